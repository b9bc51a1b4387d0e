"""The protocol of clients and servers: keys and types of messages, and kinds of methods."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np

from clients.core.arrays import Arrays
from fedapps.common.settings import setting
from fedapps.common.tasks import AUTO, SCORES

# Keys of a message's config, which the server writes and the client reads. A method's own keys are
# in the method's file.
NAMES = "names"  # the arrays' names, joined by line breaks; also a key of a reply's metrics
METHOD = "method"  # the method whose client answers; without it, the run's
SERVER_ROUND = "server-round"  # the number of the round
LR_FACTOR = "lr-factor"  # the factor of the round's learning rates; without it, 1
RUN_TOKEN = "run-token"  # the run to which the client's state belongs
LOCAL_NOISE = "dp-local-noise"  # train: the standard deviation of the client's noise
SELECTED_SCORE = "select"  # evaluate: a further score to report, which chooses the round
BOUND = "bound"  # evaluate: whether to report the training error, a term of the bound
SIDE = "side"  # DOMAIN: the label of the client's inputs, 0 or 1
ENCODING = "encoding"  # the encoding of inputs that the answers to STATISTICS gave
SHAPE = "input-shape"  # the shape of the network's inputs before that encoding
APP_SETTINGS = "fedapps-settings"  # the settings of `server_app`, in JSON
AGAIN = "again"  # WANTS: whether a node wants its model even if it has it

# Keys of the answer to "query".
CAPABILITIES = "capabilities"  # what the client can do; clients of other packages lack it
CLIENT = "client"  # the client's id
NOVEL = "novel"  # whether it is a novel client
UNLABELED = "unlabeled"  # whether it is a training client without labels
MODEL = "model"  # the name of its network
INPUT_SIZE = "input-size"  # numbers in one input
COLUMNS = "table-columns"  # a digest of its columns' names in their order, if it has a table
CLASS_NAMES = "class-names"  # a digest of its classes' names in their order, if it has such
PUBLIC = "public-projections"  # of its public samples, see `clients.core.projections`
AXES = "input-axes"  # the lengths of its inputs' axes, if these may stand in another order
MAGNITUDE = "input-magnitude"  # the power of two above the mean of its inputs' absolute values
VALUE_MAGNITUDE = "value-magnitude"  # the same of its values to predict
SCALING = "export-scaling"  # a digest of the constants that scale its export's inputs and values
FROZEN = "frozen-projections"  # of its network's frozen parameters, the same
START_ERROR = "error"  # why it cannot start
MAX_REASON = 500  # characters of it, so that a sentence says to its end what to write

# Keys of a reply's metrics. Scores have the names of `fedapps.common.tasks`; the type that a user
# prefers is `partitions.shares.SUB_POPULATION`.
NUM_EXAMPLES = "num-examples"  # the reply's number of samples; also in the answer to "query"
LOSS = "loss"  # the mean loss of these samples
SECONDS = "seconds"  # how long an evaluation took
TRAINING_ERROR = "training-error"  # the share of wrong predictions on training samples
COUNTS = "counts"  # TN, FP, FN and TP, for the F1 of sub-populations
HEAD = "head"  # the number of the head that the client uses
VALUE_SUMS = "value-sums"  # sums from which R² over all clients' samples follows
SUMS = "column-sums"  # STATISTICS: sums over the client's columns
WANTED = "wants"  # WANTS: whether the node lacks its model

# Types of messages beside "query", "train" and "evaluate".
SAVE_STATE = "query.get_state"  # reads the state; only clients of a simulation get it
RESTORE_STATE = "train.set_state"  # writes the state; the same
DOMAIN = "query.domain"  # in runs that report the terms of the generalization bound
STATISTICS = "query.statistics"  # asks for sums over a client's columns
WANTS = "query.wants"  # asks a served node whether it lacks its model
SERVE = "query.serve"  # brings a served node its model

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


def round_of(config: Mapping[str, Any]) -> int:
    """The number of the round in a message's config; 0 without one."""
    return int(config.get(SERVER_ROUND, 0))


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
