"""Samples of a user's own data that occur twice: a copy of a training sample is no test."""

import math

import numpy as np

from partitions.datasets.description import TABLE
from partitions.datasets.readers.raw import Raw

LEAST_SHARE = 0.05  # of the samples; a few copies occur in many datasets
CHANCE = 100  # so many more inputs than samples must be possible


def note_on_copies(raw: Raw, name: str) -> str:
    """A sentence on test samples that training samples equal in inputs and label, or without a
    given test part, on samples that occur more than once; "" for few of them.

    Nothing is said where equal samples are likely, as among rows of a few categories."""
    x = _inputs(raw)
    if len(x) < 2 or not x.size:
        return ""
    samples = _fingerprints(x, raw.y)
    training = samples[: raw.num_train]
    held_out = samples[raw.num_train :]
    if held_out:
        known = set(training)
        copies = sum(sample in known for sample in held_out)
        total = len(held_out)
        said = (
            f"{copies} of {total} validation and test samples equal a training sample, in inputs "
            "and label, so their scores tell little about new samples; take them out of one part"
        )
    else:
        copies = len(samples) - len(set(samples))
        total = len(samples)
        said = (
            f"{copies} of {total} samples repeat another one, in inputs and label, so test samples "
            "and novel clients can be copies of training samples; keep each sample once"
        )
    if copies < LEAST_SHARE * total or not _are_unlikely(x):
        return ""
    return f"{name}: {said}"


def _inputs(raw: Raw) -> np.ndarray:
    """The inputs (n, d), without a table's columns that name the rows."""
    if raw.inputs is not None and raw.inputs.kind == TABLE:
        used = [not column.identifier for column in raw.inputs.columns]
        return raw.x[:, used]
    return raw.x.reshape(len(raw.x), -1) if len(raw.x) else raw.x


def _fingerprints(x: np.ndarray, y: np.ndarray) -> list[int]:
    """A number for each sample, alike for equal inputs and labels."""
    return [hash((row.tobytes(), label.tobytes())) for row, label in zip(x, y, strict=True)]


def _are_unlikely(x: np.ndarray) -> bool:
    """Whether the columns' values (n, d) have so many combinations that chance repeats few rows."""
    needed = math.log(CHANCE * len(x))
    for column in x.T:
        needed -= math.log(max(len(np.unique(column)), 1))
        if needed <= 0:
            return True
    return False
