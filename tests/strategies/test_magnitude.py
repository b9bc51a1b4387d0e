"""Distances from what was sent, and which of them are absurd."""

import numpy as np

from strategies.magnitude import Magnitudes, distance


def test_distance_by_hand():
    """(4 − 1, 6 − 2) and a counter 12 − 0 that was not sent: √(9 + 16 + 144) = 13."""
    arrays = {"w": np.array([4, 6], np.float32), "n": np.array(12)}
    assert distance(arrays, {"w": np.array([1, 2], np.float32)}) == 13.0
    assert distance({"w": np.full(2, 3e38, np.float32)}, {}) == np.inf
    assert distance({"n": np.array([2**62, 2**62])}, {}) == np.sqrt(2) * 2.0**62  # no overflow
    assert distance({"w": np.ones(4, np.float16)}, {"w": np.ones(3, np.float16)}) == 2.0


def test_limits_by_hand():
    """1000 × the median 3 of (2, 3, 1e10); of two the lower counts; former ones count as well."""
    magnitudes = Magnitudes()
    assert magnitudes.limit("train", [2.0, 1e10, 3.0]) == 3000.0
    assert magnitudes.limit("train", [1e12]) == 3000.0  # the median of 2, 3, 1e12
    assert magnitudes.limit("query.encode", [1e10, 5.0]) == 5000.0
    assert magnitudes.limit("query.som", [1e-9, 1e-8]) == 1000.0  # who hardly moves is no measure
    assert magnitudes.limit("query.domain", [np.inf]) == 1e18
