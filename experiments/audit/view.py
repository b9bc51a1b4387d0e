"""What an observer sees, as numbers by name, and the score by which an attack decides."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import ArrayRecord, Message

from clients.core import privacy
from clients.core.arrays import Arrays, from_record

View = dict[str, float]  # numbers by name; a text is a 1 under its name and content
SMALLEST = 1e-12  # variance, of a number without noise
HALF = (1 << 63).to_bytes(8, "little")  # read as a uniform number: ½, whose Φ⁻¹ is 0


def of_arrays(arrays: Arrays) -> View:
    """Every entry of the arrays, integers too."""
    view: View = {}
    for name, array in arrays.items():
        for place, value in enumerate(array.ravel().tolist()):
            view[f"{name}[{place}]"] = float(value)
    return view


def of_values(values: Mapping[str, Any], prefix: str = "") -> View:
    """Every number in nested tables and lists, and every text."""
    view: View = {}
    for name, value in values.items():
        place = f"{prefix}{name}"
        if isinstance(value, Mapping):
            view |= of_values(value, f"{place}.")
        elif isinstance(value, list | tuple):
            view |= of_values({str(i): entry for i, entry in enumerate(value)}, f"{place}.")
        elif isinstance(value, bool | int | float):
            view[place] = float(value)
        else:
            view[f"{place}={value}"] = 1.0
    return view


def of_message(message: Message, prefix: str = "") -> View:
    """All that a message holds: arrays, metrics, configuration, or its error."""
    if message.has_error():
        return {f"{prefix}error {message.error.code}: {message.error.reason}": 1.0}
    view: View = {}
    for key, record in message.content.items():
        if isinstance(record, ArrayRecord):
            view |= {f"{prefix}{key}/{n}": v for n, v in of_arrays(from_record(record)).items()}
        else:
            view |= of_values(dict(record), f"{prefix}{key}/")
    return view


def scores(
    expected: Sequence[View], observed: Sequence[Sequence[View]]
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the repeats in both worlds: the projection on the difference of what is `expected`
    in them, each number weighed by its precision.

    For Gaussian noise this is the likelihood ratio, the best statistic (Neyman and Pearson). A
    number that differs and has no noise, such as a counter, decides alone. Precisions are those of
    the repeats that choose the threshold."""
    names = sorted(set().union(*expected))
    without, present = _table(expected, names)
    observed_without, observed_present = [_table(views, names) for views in observed]
    # Every other repeat: `lower_bound` chooses the threshold by these, and counts the others.
    variances = [observed_without[::2].var(0), observed_present[::2].var(0)]
    variance = np.mean(variances, axis=0)
    direction = (present - without) / np.maximum(variance, SMALLEST)
    scores_without = (observed_without - without) @ direction
    scores_present = (observed_present - without) @ direction
    return scores_without, scores_present


def _table(views: Sequence[View], names: Sequence[str]) -> np.ndarray:
    """A row of numbers for each view; 0 for a name that it lacks."""
    table = np.zeros((len(views), len(names)))
    for row, view in zip(table, views, strict=True):
        row[:] = [view.get(name, 0.0) for name in names]
    return table


class _Entropy:
    """Stands for the `os` module where noise is drawn."""

    def __init__(self, source: Any) -> None:
        self.urandom = source


@contextmanager
def seeded_entropy(seed: int) -> Iterator[None]:
    """Inside, the system's entropy is repeatable. All that makes noise of it is the real code."""
    with patch.object(privacy, "os", _Entropy(np.random.default_rng(seed).bytes)):
        yield


@contextmanager
def no_noise() -> Iterator[None]:
    """Inside, every uniform number that privacy draws is ½, and so all noise is 0."""
    with patch.object(privacy, "os", _Entropy(lambda size: HALF * (size // len(HALF)))):
        yield
