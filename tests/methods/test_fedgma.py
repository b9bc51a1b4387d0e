"""FedGMA: masks and steps by hand."""

import numpy as np
from small_runs import update

from strategies.methods.fedavg import FedAvg
from strategies.methods.fedgma import FedGMA


def test_a_round_by_hand():
    """Δ = (1, 1, 0), (1, −1, 0), (1, −1, 3): A = (1, ⅓, ⅓), τ = 0.5, mask = A,
    mean Δ = (1, −⅓, 1), η_g = 2: w + (2, −2/9, ⅔)."""
    w = np.array([1.0, 2.0, 3.0])
    deltas = [[1, 1, 0], [1, -1, 0], [1, -1, 3]]
    replies = [update(i, {"w": w + np.array(d)}) for i, d in enumerate(deltas)]
    after = FedGMA(server_lr=2.0, agreement=0.5).aggregate({"w": w}, replies)
    np.testing.assert_allclose(after["w"], [3, 2 - 2 / 9, 3 + 2 / 3])
    strict = FedGMA(server_lr=2.0, agreement=0.3).aggregate({"w": w}, replies)
    np.testing.assert_allclose(strict["w"], [3, 2 - 2 / 3, 5])


def test_without_threshold_it_is_fedavg_with_server_lr():
    rng = np.random.default_rng(0)
    w = {"w": rng.normal(size=(3, 2)).astype(np.float32)}
    replies = [update(i, {"w": rng.normal(size=(3, 2)).astype(np.float32)}) for i in range(5)]
    average = FedAvg().aggregate(w, replies)["w"]
    for rate in (1.0, 0.5):
        after = FedGMA(server_lr=rate, agreement=0.0).aggregate(w, replies)["w"]
        np.testing.assert_allclose(after, w["w"] + rate * (average - w["w"]), atol=1e-6)
        assert after.dtype == np.float32


def test_an_agreement_of_just_the_threshold_is_enough():
    """Signs (1, 1, 1, −1): A = ½ = τ, so the mask is 1 and w moves by the whole mean, 1."""
    replies = [update(i, {"w": np.array([3.0 + d])}) for i, d in enumerate([2, 2, 1, -1])]
    after = FedGMA(server_lr=1.0, agreement=0.5).aggregate({"w": np.array([3.0])}, replies)
    assert after["w"].tolist() == [4.0]


def test_the_step_decays_with_the_other_rates_and_statistics_are_averaged():
    """η_g = 2 is halved in round 2: w moves by the mean change 2 under the mask 1. A running mean
    of 1 and 3 from 1 and 3 samples becomes (1 + 9)/4, whatever the rate."""
    strategy = FedGMA(server_lr=2.0, agreement=0.5, lr_decay=0.25, lr_decay_rounds=2)
    strategy.now.number = 2
    before = {"w": np.zeros(1, np.float32), "norm.running_mean": np.zeros(1, np.float32)}
    replies = [
        update(i, dict.fromkeys(before, np.full(1, value, np.float32)), n=value)
        for i, value in enumerate((1, 3))
    ]
    after = strategy.aggregate(before, replies)
    assert after["w"].tolist() == [2.0]
    assert after["norm.running_mean"].tolist() == [2.5]
