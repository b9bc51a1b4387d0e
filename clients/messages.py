"""Between Flower's messages and a client's methods: lists of arrays get their names back."""

from typing import Any

import numpy as np

from clients.arrays import Arrays
from clients.protocol import NAMES, RESTORE_STATE, SAVE_STATE

Config = dict[str, Any]
Metrics = dict[str, Any]
NDArrays = list[np.ndarray]


def with_names(parameters: NDArrays, config: Config, default: list[str]) -> Arrays:
    """The arrays under the names in ``config["names"]``, or under the `default` ones.

    Raises ValueError if the numbers of arrays and names differ."""
    names = default
    if NAMES in config:
        names = [name for name in str(config[NAMES]).split("\n") if name]
    if len(names) != len(parameters):
        raise ValueError(f"{len(parameters)} arrays for {len(names)} names: {names}")
    return dict(zip(names, parameters, strict=True))


def answer_exchange(
    client: Any, action: str, arrays: Arrays, config: Config
) -> tuple[Arrays, Metrics]:
    """The answer of a `clients.base.Client` to a message beside "query", "train" and "evaluate".

    The method that the message's type names gives it: `encode` answers ``query.encode``."""
    client.begin(action, config)
    if action == SAVE_STATE:  # for the checkpoint of a simulation
        return client.state, {}
    if action == RESTORE_STATE:
        client.state = dict(arrays)
        return {}, {}
    reply: tuple[Arrays, Metrics] = getattr(client, action.partition(".")[2])(arrays, config)
    return reply
