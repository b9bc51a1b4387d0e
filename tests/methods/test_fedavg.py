"""Means of models, by hand."""

import numpy as np
import pytest
from small_runs import update

from clients.core.arrays import as_type, settled
from strategies.core.aggregation import MEANS, mean, mean_statistics, robust_mean, weighted_mean
from strategies.core.limits import scaled
from strategies.methods.fedavg import FedAvg

NAMES = ("w", "norm.running_mean", "norm.num_batches_tracked")


def replies():
    """Of 1, 2 and 5 samples."""
    numbers = [(8.0, 0.5, 5), (4.0, 2.0, 7), (1.6, -1.0, 9)]
    return [
        update(i, dict(zip(NAMES, map(np.array, got), strict=True)), n)
        for i, (got, n) in enumerate(zip(numbers, (1, 2, 5), strict=True))
    ]


def test_a_model_counts_by_its_samples_and_whole_numbers_stay_whole():
    """(8 + 2·4 + 5·1.6)/8 = 3, (0.5 + 4 − 5)/8 = −0.0625, (5 + 14 + 45)/8 = 8; of the first two
    (5 + 14)/3 = 6.33 becomes 6, and (5 + 2·6)/3 = 5.67 becomes 6, too."""
    found = FedAvg().aggregate({}, replies())
    assert [found[name].tolist() for name in NAMES] == [3.0, -0.0625, 8]
    one, two, _ = replies()
    count = NAMES[2]
    assert FedAvg().aggregate({}, [one, two])[count] == 6
    two.arrays[count] = np.array(6)
    rounded = FedAvg().aggregate({}, [one, two])[count]
    assert rounded == 6 and rounded.dtype.kind == "i"


def test_statistics_are_weighed_where_weights_are_not():
    """The plain mean of w is 13.6/3; running statistics alone are taken, by samples."""
    assert mean([u.arrays for u in replies()])["w"] == np.float64(13.6) / 3
    found = mean_statistics(replies())
    assert {name: a.tolist() for name, a in found.items()} == {NAMES[1]: -0.0625, NAMES[2]: 8}


KINDS = {
    "count": (np.array(2), np.array(7), 6),  # (2 + 3·7) / 4 = 5.75
    "small": (np.uint8([250, 1]), np.uint8([254, 2]), [253, 2]),  # 253 and 1.75
    "mask": (np.array([True, True, False]), np.array([False, True, True]), [False, True, True]),
    "half": (np.float16([1.0]), np.float16([3.0]), [2.5]),
    "gain": (np.float32(1.0), np.float32(3.0), 2.5),
}


def test_a_mean_keeps_dtypes_and_shapes():
    """Weights 1 and 3; the mask's means are 0.25, 1 and 0.75."""
    one, two = ({n: np.asarray(kind[i]) for n, kind in KINDS.items()} for i in (0, 1))
    for name, array in weighted_mean([one, two], [1, 3]).items():
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.shape) == (one[name].dtype, one[name].shape)
        assert array.tolist() == KINDS[name][2]


@pytest.mark.parametrize("kind", MEANS)
def test_so_do_robust_means_and_clipped_updates(kind):
    start = {n: np.asarray(first) for n, (first, _, _) in KINDS.items()}
    models = [start, {n: np.asarray(second) for n, (_, second, _) in KINDS.items()}, start]
    found = robust_mean(kind, 0.4, start, models)
    near = scaled(models[1], start, dict.fromkeys(("", "count", "mask"), 0.75))  # no counters
    for name, array in start.items():
        for other in (found[name], near[name]):
            assert isinstance(other, np.ndarray)
            assert (other.dtype, other.shape) == (array.dtype, array.shape)
    assert all(near[name] is models[1][name] for name in ("count", "mask"))


def test_numbers_beyond_a_dtype_are_its_nearest():
    assert as_type(np.array([-0.7, 300.0, 2.5]), np.dtype(np.uint8)).tolist() == [0, 255, 2]
    assert as_type(np.array([-3.0, 0.4, 0.6]), np.dtype(bool)).tolist() == [False, False, True]


def test_what_is_aggregated_has_the_order_and_the_dtypes_of_before():
    """And no variance below 0; new arrays come last, as they are."""
    like = {"w": np.zeros(1), "norm.running_var": np.ones(2), "n": np.array(1, np.int32)}
    mixed = {"new": np.float16(1), "n": np.float64(2.6), "norm.running_var": np.array([-1.0, 2])}
    found = settled(mixed, like)
    assert [(n, a.tolist(), a.dtype.str[1:]) for n, a in found.items()] == [
        ("norm.running_var", [0, 2], "f8"), ("n", 3, "i4"), ("new", 1, "f2"),
    ]  # fmt: skip
    assert all(isinstance(array, np.ndarray) for array in found.values())
