"""What clients and servers agree on: keys of messages, types of messages, kinds of methods."""

from enum import StrEnum
from typing import Any

import numpy as np

from clients.core.arrays import Arrays
from fedapps.common.settings import setting

NAMES = "names"  # config and metrics key: the arrays' names, joined by line breaks
LR_FACTOR = "lr-factor"  # config key: factor of the round's learning rates
CAPABILITIES = (
    "capabilities"  # key of the answer to "query": what the client offers; other clients lack it
)
UNLABELED = "unlabeled"  # key of the same answer: a training client that has no labels
RUN_TOKEN = "run-token"  # config key: the run that the client's state belongs to
SAVE_STATE, RESTORE_STATE = (
    "query.get_state",
    "train.set_state",
)  # only to the clients of a simulation
DOMAIN = "query.domain"  # of runs that report the terms of the generalization bound

HEADS = setting("client", "who holds personal heads", ("client", "server"))

SELECT = ("accuracy", "loss", "macro-f1")  # scores that may choose the reported round

FEW_SAMPLES = 10  # a client's score on fewer is warned of: one sample is more than 10 points


class FewShot(StrEnum):
    """How a novel client learns from a few labeled samples; NONE is false."""

    NONE = ""
    TUNED = "tuned"  # it trains on them before it is scored
    ROUNDS = "rounds"  # in rounds after the others'
    DESCRIPTOR = "descriptor"  # they describe it to the server, which generates its model


class StateUse(StrEnum):
    """What a client's state serves between rounds; NONE is false."""

    NONE = ""
    TRAINING = "training"
    PREDICTIONS = "predictions"  # a finished run must hold it


def lr_factor(decay: float, every: int, round_: int) -> float:
    """decay^((round − 1) / every): the factor of the learning rates in a round, from 1."""
    return decay ** (max(round_ - 1, 0) / every)


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
    """The answer of a `clients.core.client.Client` to a message beside "query", "train" and
    "evaluate".

    The method that the message's type names gives it: `encode` answers ``query.encode``."""
    client.begin(action, config)
    if action == SAVE_STATE:  # for the checkpoint of a simulation
        return client.state, {}
    if action == RESTORE_STATE:
        client.state = dict(arrays)
        return {}, {}
    reply: tuple[Arrays, Metrics] = getattr(client, action.partition(".")[2])(arrays, config)
    return reply
