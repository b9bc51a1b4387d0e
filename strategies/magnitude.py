"""How large replies are: those that are absurdly so are refused, and updates may be clipped."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clients.arrays import Arrays, as_type

ABSURD = 1000.0  # times the usual distance from what was sent; no honest client comes near it
LARGEST = 1e18  # beyond it squares overflow in float32
REMEMBERED = 200  # distances of former replies


def distance(arrays: Arrays, start: Arrays) -> float:
    """‖y − x‖ over all arrays y; x is 0 where `start` lacks one of the same shape."""
    total = 0.0
    with np.errstate(over="ignore"):  # infinitely far is an answer, too
        for name, y in arrays.items():
            wide = y if y.dtype in (np.float32, np.float64) else y.astype(np.float64)
            x = start.get(name)
            change = wide if x is None or x.shape != y.shape else wide - x
            total += float(np.vdot(change, change))
    return math.sqrt(total)


def scaled(arrays: Arrays, start: Arrays, factor: float) -> Arrays:
    """x + factor (y − x) for all arrays y, x being as in `distance`, in their own dtypes."""
    found: Arrays = {}
    for name, y in arrays.items():
        x = start.get(name)
        x = np.zeros_like(y) if x is None or x.shape != y.shape else x
        found[name] = as_type(x + factor * (y.astype(float) - x), y.dtype)
    return found


def finite(state: Any) -> bool:
    """Whether all numbers are finite in dicts, lists, tuples and sets of arrays and whatever else
    a strategy's state is made of."""
    if isinstance(state, Mapping):
        return all(map(finite, state.values()))
    if isinstance(state, list | tuple | set):
        return all(map(finite, state))
    if isinstance(state, np.ndarray) and state.dtype.kind == "f":
        # a finite sum of squares, in half of the time, spares the look at each number
        return math.isfinite(np.vdot(state, state)) or bool(np.isfinite(state).all())
    return not isinstance(state, float) or math.isfinite(state)


class Magnitudes:
    """What distances replies of each kind of message have had."""

    def __init__(self) -> None:
        self._usual: dict[str, deque[float]] = {}

    def state(self) -> dict[str, list[float]]:
        """The distances, by kind of message."""
        return {kind: list(usual) for kind, usual in self._usual.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from a `state`."""
        self._usual = {kind: deque(usual, maxlen=REMEMBERED) for kind, usual in state.items()}

    def limit(self, kind: str, distances: Sequence[float]) -> float:
        """The largest plausible one of these `distances`, which are then remembered.

        It is ABSURD times their median together with the former ones', the lower of two: one bad
        reply of two does not raise it. A median below 1 counts as 1."""
        usual = self._usual.setdefault(kind, deque(maxlen=REMEMBERED))
        known = sorted([*usual, *distances])
        limit = min(ABSURD * max(1.0, known[(len(known) - 1) // 2]), LARGEST)
        usual.extend(value for value in distances if value <= limit)
        return limit
