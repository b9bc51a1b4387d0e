"""Distances from what was sent, and which of them are absurd."""

import numpy as np
import pytest

from strategies.replies import Magnitudes, distance, finite, scaled


def test_distance_by_hand():
    """(4 − 1, 6 − 2) and a counter 12 − 0 that was not sent: √(9 + 16 + 144) = 13."""
    arrays = {"w": np.array([4, 6], np.float32), "n": np.array(12)}
    assert distance(arrays, {"w": np.array([1, 2], np.float32)}) == 13.0
    assert distance({"w": np.full(2, 3e38, np.float32)}, {}) == np.inf
    assert distance({"n": np.array([2**62, 2**62])}, {}) == np.sqrt(2) * 2.0**62  # no overflow
    assert distance({"w": np.ones(4, np.float16)}, {"w": np.ones(3, np.float16)}) == 2.0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_are_finite_though_their_squares_are_not(dtype):
    most = np.full((2, 3), np.finfo(dtype).max)
    assert finite({"w": [most, np.zeros((0, 2), dtype)], "n": np.array(2**62)})
    for strange in (np.nan, np.inf):
        most[1, 2] = strange
        assert not finite({"w": [most]})


def test_limits_by_hand():
    """1000 × the median 3 of (2, 3, 1e10); of two the lower counts; former ones count as well."""
    magnitudes = Magnitudes()
    assert magnitudes.limit("train", [2.0, 1e10, 3.0]) == 3000.0
    assert magnitudes.limit("train", [1e12]) == 3000.0  # the median of 2, 3, 1e12
    assert magnitudes.limit("query.encode", [1e10, 5.0]) == 5000.0
    assert magnitudes.limit("query.som", [1e-9, 1e-8]) == 1000.0  # who hardly moves is no measure
    assert magnitudes.limit("query.domain", [np.inf]) == 1e18


def test_scaling_by_hand():
    """From 1 to 5 by a quarter: 2; from nothing to 8: 2; a counter from 0 to 10: 2.5, even 2."""
    arrays = {"w": np.array([5], np.float32), "d": np.array([8.0]), "n": np.array(10)}
    near = scaled(arrays, {"w": np.array([1], np.float32), "d": np.zeros(3)}, 0.25)
    assert {name: a.tolist() for name, a in near.items()} == {"w": [2.0], "d": [2.0], "n": 2}
    assert [a.dtype for a in near.values()] == [a.dtype for a in arrays.values()]


def test_an_absurd_distance_is_not_what_is_usual():
    """Of 2, 3 and 1e10 the first two are remembered: 1e12, sent repeatedly, stays absurd,
    where with the absurd ones the median of 2, 3, 1e10, 1e12, 1e12 would be 1e10."""
    magnitudes = Magnitudes()
    for distances in ([2.0, 1e10, 3.0], [1e12], [1e12]):
        assert magnitudes.limit("train", distances) == 3000.0
    assert magnitudes.state() == {"train": [2.0, 3.0]}
