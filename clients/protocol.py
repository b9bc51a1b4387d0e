"""What clients and servers agree on: keys of messages, types of messages, kinds of methods."""

from enum import StrEnum

NAMES = "names"  # config and metrics key: the arrays' names, joined by line breaks
LR_FACTOR = "lr-factor"  # config key: factor of the round's learning rates
OFFERS = "fedapps"  # key of the answer to "query": what the client offers; other clients lack it
UNLABELED = "unlabeled"  # key of the same answer: a training client that has no labels
RUN_TOKEN = "run-token"  # config key: the run that the client's state belongs to
SAVE_STATE, RESTORE_STATE = "query.keep", "train.recall"  # only to the clients of a simulation
DOMAIN = "query.domain"  # of runs that report the terms of the generalization bound

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
