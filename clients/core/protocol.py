"""The protocol of clients and servers: keys and types of messages, and kinds of methods."""

from enum import StrEnum
from typing import Any

import numpy as np

from clients.core.arrays import Arrays
from fedapps.common.settings import setting
from fedapps.common.tasks import AUTO, SCORES

# Key of a message's config and of a reply's metrics: the arrays' names, joined by line breaks.
NAMES = "names"
# Keys of a message's config: the factor of the round's learning rates, and the run to which the
# client's state belongs.
LR_FACTOR = "lr-factor"
RUN_TOKEN = "run-token"
# Keys of the answer to "query": the capabilities of the client, which clients of other packages
# lack, and whether it is a training client without labels.
CAPABILITIES = "capabilities"
UNLABELED = "unlabeled"
# Types of messages that only clients of a simulation get: read the state, write the state.
SAVE_STATE = "query.get_state"
RESTORE_STATE = "train.set_state"
# Type of a message in runs that report the terms of the generalization bound.
DOMAIN = "query.domain"
# Type of the message that asks for sums over a client's columns, and the key of its answer; keys of
# a message's config: the encoding of inputs that the answers gave, and the shape of the network's
# inputs before that.
STATISTICS = "query.statistics"
SUMS = "column-sums"
ENCODING = "encoding"
SHAPE = "input-shape"

HEADS = setting("client", "who holds personal heads", ("client", "server"))

# Scores of tasks that may choose the reported round; "auto" is the task's main one. A user's own
# may choose it as well.
SELECT = (AUTO, *SCORES)

# A client that is scored on fewer samples causes a warning: one sample is more than 10 points.
FEW_SAMPLES = 10


class FewShot(StrEnum):
    """How a novel client learns from a few labeled samples; NONE is false."""

    NONE = ""
    TUNED = "tuned"  # it trains on the samples before it is scored
    ROUNDS = "rounds"  # it trains in extra rounds, after those of the training clients
    DESCRIPTOR = "descriptor"  # the server generates its model from a descriptor of the samples


class StateUse(StrEnum):
    """For what a method needs the state that a client keeps between rounds; NONE is false."""

    NONE = ""
    TRAINING = "training"
    PREDICTIONS = "predictions"  # so a finished run must hold the state


def lr_factor(decay: float, every: int, round_: int) -> float:
    """The factor of the learning rates in a round ≥ 1: decay^((round − 1) / every)."""
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
    """The answer of a `clients.core.client.Client` to a message of another type than "query",
    "train" and "evaluate".

    The message's type names the method that answers: `encode` answers ``query.encode``."""
    client.begin(action, config)
    if action == SAVE_STATE:
        return client.state, {}
    if action == RESTORE_STATE:
        client.state = dict(arrays)
        return {}, {}
    method = getattr(client, action.partition(".")[2])
    reply: tuple[Arrays, Metrics] = method(arrays, config)
    return reply
