"""The step partition: its counts by hand, every tuple of major classes, nothing twice."""

from collections import Counter

import numpy as np
import pytest

from partitions.rules.step import StepPartitioner, counts


def held_counts(toy, divide, held, labels, **changes):
    """Counts (num_clients, num_classes) of each client, the roles, and all rows."""
    fed = divide(toy(labels), partition="step", **changes)
    parts = held(fed)
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows)
    labels = np.asarray(labels)
    return np.stack([np.bincount(labels[p], minlength=labels.max() + 1) for p in parts]), fed.novel


def test_atps_300_clients(toy, divide, held):
    """200 samples, weights 1 + 15 for each occurrence, 40 in all: 16/40 of 200 = 80, 1/40 = 5;
    31/40 = 155 where a class occurs twice. 100 ordered pairs, three clients each: for a ≠ b both
    orders count alike, so 6 clients hold 80 of each of the 45 pairs, and 3 hold 155 of each class.
    A class is needed 3·(155 + 2·9·80 + 81·5) = 6000 times, exactly what there is."""
    got, novel = held_counts(
        toy, divide, held, np.arange(60_000) % 10, num_clients=300, train_fraction=0.8
    )
    assert (novel.sum(), got.sum()) == (60, 60_000)
    assert {tuple(sorted(row)) for row in got} == {(5,) * 8 + (80, 80), (5,) * 9 + (155,)}
    majors = Counter(tuple(np.flatnonzero(row > 5)) for row in got)
    pairs = {(a, b): 6 for a in range(10) for b in range(a + 1, 10)}
    assert majors == pairs | {(a,): 3 for a in range(10)}


def test_another_ratio_and_one_major_class(toy, divide, held):
    """Three classes, ratio 3, one major class: weights 3, 1, 1 of 10 samples are 6, 2, 2. Six
    clients: each class is the major one of two."""
    got, _ = held_counts(
        toy, divide, held, np.arange(90) % 3, num_clients=6, partition_major_classes=1,
        partition_ratio=3.0, partition_samples_per_client=10,
    )  # fmt: skip
    assert Counter(map(tuple, got)) == {(6, 2, 2): 2, (2, 6, 2): 2, (2, 2, 6): 2}


def test_rounding_keeps_the_size_and_favours_no_class():
    """7 samples by weights 4, 1, 1: shares 4.67, 1.17, 1.17. Client 0 rounds the sums 4.67, 5.83, 7
    to 5, 6, 7: 5, 1, 1. Client 1 begins with class 1: 1.17, 2.33, 7 to 1, 2, 7: 5, 1, 1. Weights
    1, 1, 1 of 4: client 0 rounds 1.33, 2.67, 4 to 1, 3, 4, and client 1 one class later."""
    assert counts(np.array([[4.0, 1, 1], [4, 1, 1]]), 7, each=True).tolist() == [[5, 1, 1]] * 2
    assert counts(np.ones((2, 3)), 4, each=True).tolist() == [[1, 2, 1], [1, 1, 2]]
    assert counts(np.ones((2, 3)), 4).tolist() == [2, 3, 3]


def test_fifty_clients_of_digits_share_out_nearly_all(divide):
    """The least frequent digit occurs 174 times, and five blocks need it 5 times the size of a
    client: 34 at most, while 1797 / 50 are 35."""
    fed = divide(partition="step", num_clients=50, train_fraction=0.8)
    sizes = {len(fed.share(client).everything) for client in range(50)}
    assert sizes == {34}
    assert fed.novel.sum() == 10
    rows = np.concatenate([fed.share(client).everything.index for client in range(50)])
    assert len(np.unique(rows)) == len(rows) == 50 * 34


def test_seeds_decide_and_more_than_there_is_is_refused(divide):
    drawn = [StepPartitioner(7, 2, 16.0, 0, seed).weights(10).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ValueError, match=r"per-client is 35; for num-clients=50 .* at most 34"):
        divide(partition="step", num_clients=50, partition_samples_per_client=35)
