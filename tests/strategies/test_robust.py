"""Robust means on numbers worked out by hand; one or two of five clients lie."""

import numpy as np
import pytest
from small_runs import update

from strategies.core.aggregation import robust_mean
from strategies.methods.fedavg import FedAvg
from strategies.methods.pfedme import PFedMe

START = {"w": np.array([10.0, 0.0], np.float32), "n": np.array(3)}
CHANGES = [(1.0, 2.0), (2.0, -1.0), (4.0, 0.5), (3.0, 1.5), (-90.0, 700.0)]
MODELS = [
    {"w": START["w"] + np.array(change, np.float32), "n": np.array(3 + i)}
    for i, change in enumerate(CHANGES)
]


def test_median_by_hand():
    """Changes sorted: −90 1 2 3 4 and −1 0.5 1.5 2 700; medians 2 and 1.5; counters 3 + 2."""
    moved = robust_mean("median", 0.2, START, MODELS)
    assert moved["w"].tolist() == [12.0, 1.5]
    assert moved["n"].tolist() == 5
    assert (moved["w"].dtype, moved["n"].dtype) == (np.float32, np.int64)


def test_trimmed_mean_by_hand():
    """One is cut off at each end: (1 + 2 + 3)/3 = 2 and (0.5 + 1.5 + 2)/3 = 4/3."""
    moved = robust_mean("trimmed-mean", 0.2, START, MODELS)
    np.testing.assert_allclose(moved["w"], [12.0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(
        robust_mean("trimmed-mean", 0.0, START, MODELS)["w"], [10 - 16, 703 / 5], rtol=1e-6
    )


def test_krum_leaves_out_who_is_far_from_the_others():
    """f = 1 of 5: the mean of the other four, (1+2+4+3)/4 = 2.5 and (2−1+0.5+1.5)/4 = 0.75."""
    moved = robust_mean("krum", 0.2, START, MODELS)
    np.testing.assert_allclose(moved["w"], [12.5, 0.75], rtol=1e-6)


def test_krum_measures_no_counter():
    """Clients 0 to 3 lie within 1.5 of each other, client 4 by 100 away, by one step of training.
    Client 0 trained 1000 times as often. With counters in the distances it would be left out."""
    changes = [0.0, 0.5, 1.0, 1.5, 100.0]
    steps = [9000, 9, 9, 9, 9]
    start = {"w": np.zeros(1), "n": np.array(0)}
    models = [{"w": np.array([c]), "n": np.array(k)} for c, k in zip(changes, steps, strict=True)]
    moved = robust_mean("krum", 0.2, start, models)
    assert moved["w"].tolist() == [0.75]
    assert moved["n"].tolist() == round((9000 + 27) / 4)
    only = [{"n": model["n"]} for model in models]
    assert robust_mean("krum", 0.2, start, only)["n"].tolist() == round(9036 / 5)


@pytest.mark.parametrize("kind", ["median", "trimmed-mean", "krum"])
def test_the_methods_that_average_take_them(kind):
    """Sample counts count for nothing; pFedMe mixes: 0.5 · 10 + 0.5 · the mean."""
    expected = robust_mean(kind, 0.2, START, MODELS)["w"]
    replies = [update(i, model, n=10**i) for i, model in enumerate(MODELS)]
    moved = FedAvg(robust=kind).aggregate(START, replies)
    np.testing.assert_array_equal(moved["w"], expected)
    mixed = PFedMe(robust=kind, server_beta=0.5).aggregate(START, replies)
    np.testing.assert_allclose(mixed["w"], 0.5 * START["w"] + 0.5 * expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "clients", "plain"),
    [("krum", 4, True), ("trimmed-mean", 4, True), ("median", 4, False), ("krum", 5, False)],
)
def test_a_robust_mean_that_is_the_plain_one_says_so(kind, clients, plain, caplog):
    """A fifth of four clients is nobody: all of them count, also a client that lies."""
    replies = [update(i, model, n=10**i) for i, model in enumerate(MODELS[-clients:])]
    moved = FedAvg(robust=kind).aggregate(START, replies)
    mean = np.mean([model["w"] for model in MODELS[-clients:]], 0)
    assert np.allclose(moved["w"], mean) == plain
    assert ("it is the plain mean" in caplog.text) == plain
