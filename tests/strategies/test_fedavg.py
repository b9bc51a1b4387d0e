"""Means of models, by hand."""

import numpy as np
from tiny import update

from strategies.fedavg import FedAvg, mean, mean_statistics

NAMES = ("w", "norm.running_mean", "norm.num_batches_tracked")


def replies():
    """Of 1, 2 and 5 samples."""
    numbers = [(8.0, 0.5, 5), (4.0, 2.0, 7), (1.6, -1.0, 9)]
    return [
        update(i, dict(zip(NAMES, map(np.array, told), strict=True)), n)
        for i, (told, n) in enumerate(zip(numbers, (1, 2, 5), strict=True))
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
