"""AFL: the projection on the simplex, rounds and risks by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import share, update
from torch import nn

from clients.core.arrays import model_arrays
from clients.core.simplex import project
from clients.methods.afl import AFLClient
from strategies.core.replies import Node
from strategies.methods.afl import AFL


def make(mixture_lr, clients=2):
    strategy = AFL(mixture_lr=mixture_lr, protect=True)
    strategy.nodes = [Node(i, 50 + i) for i in range(clients)]
    return strategy


@pytest.mark.parametrize(
    ("v", "expected"),
    [([0.5, 0.9], [0.3, 0.7]), ([2.0, 0.0, 0.1], [1.0, 0.0, 0.0]), ([-1.0, -1.0], [0.5, 0.5])],
)
def test_projection_by_hand(v, expected):
    np.testing.assert_allclose(project(np.array(v)), expected)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(0.01, 3))
def test_projection_meets_its_optimality_conditions(v, mass):
    """λ ≥ 0, Σλ = mass, and v − λ is one number θ where λ > 0, at most θ elsewhere."""
    v = np.array(v)
    point = project(v, mass)
    assert (point >= 0).all()
    assert point.sum() == pytest.approx(mass)
    theta = (v - point)[point > 1e-12]
    assert np.ptp(theta) < 1e-9
    assert (v[point <= 1e-12] <= theta[0] + 1e-9).all()


def test_projection_on_no_mass_is_zero():
    np.testing.assert_array_equal(project(np.array([0.3, 0.1]), 0.0), [0, 0])
    np.testing.assert_array_equal(project(np.array([3.0]), 1e-20), [0])


def test_a_round_by_hand():
    """λ = (½, ½), w_i = (1, 3) → w = 2; L = (1, 2), γ_λ = 0.1 → Π(0.6, 0.7) = (0.45, 0.55);
    then w = 0.45·1 + 0.55·3 = 2.1."""
    strategy = make(0.1)
    replies = [
        update(0, {"w": np.array([1.0])}, risk=1.0),
        update(1, {"w": np.array([3.0])}, risk=2.0),
    ]
    assert strategy.aggregate({}, replies)["w"].item() == pytest.approx(2.0)
    assert strategy.mixture == pytest.approx({0: 0.45, 1: 0.55})
    assert strategy.aggregate({}, replies)["w"].item() == pytest.approx(2.1)
    assert strategy.report() == pytest.approx({"mixture-max": 0.6, "mixture-min": 0.4})


def test_a_long_change_counts_less():
    """λ = (½, ½), the second change of ρ = 6: its weight is ½·3/6, so w = (½·1 + ¼·3) / ¾ = 5/3.
    Its risk still decides λ."""
    strategy = make(0.1)
    replies = [
        update(0, {"w": np.array([1.0])}, risk=1.0),
        replace(update(1, {"w": np.array([3.0])}, risk=2.0), rho=6.0),
    ]
    assert strategy.aggregate({}, replies)["w"].item() == pytest.approx(5 / 3)
    assert strategy.mixture == pytest.approx({0: 0.45, 1: 0.55})


def test_clients_that_are_not_sampled_keep_their_weight():
    """λ = ⅓ each; 0 and 2 share their ⅔: Π(⅓ + 0, ⅓ + 0.2) on mass ⅔ = (⅓ − 0.1, ⅓ + 0.1)."""
    strategy = make(0.1, clients=3)
    w = {"w": np.zeros(1)}
    strategy.aggregate({}, [update(0, w, risk=0.0), update(2, w, risk=2.0)])
    assert strategy.mixture == pytest.approx({0: 1 / 3 - 0.1, 1: 1 / 3, 2: 1 / 3 + 0.1})


def test_a_client_that_joins_gets_its_share_and_one_without_risk_keeps_its_weight():
    strategy = make(0.1)
    w = {"w": np.zeros(1)}
    strategy.aggregate({}, [update(0, w, risk=1.0), update(1, w, risk=2.0)])
    strategy.nodes.append(Node(2, 52))
    strategy.aggregate({}, [update(0, w, risk=float("nan")), update(1, w), update(2, w)])
    assert strategy.mixture == pytest.approx({0: 0.3, 1: 1.1 / 3, 2: 1 / 3})


def test_the_clients_risk_is_the_loss_of_what_was_sent():
    """Zero weights on 4 classes: ln 4, whatever the local steps do after it."""
    model = nn.Linear(2, 4)
    client = AFLClient(model, share(torch.randn(6, 2), torch.arange(6) % 4), local_steps=3, lr=0.5)
    zeros = {name: np.zeros_like(a) for name, a in model_arrays(model).items()}
    reply, n, metrics = client.train(zeros, {})
    assert metrics["risk"] == pytest.approx(math.log(4))
    assert n == 6 and np.abs(reply["weight"]).max() > 0


def test_the_clients_risk_is_the_mean_over_all_that_it_trains_on():
    """W = (2, 0) at x = 1: label 1 costs ln(1 + e²) = 2 + ln(1 + e⁻²) and label 0 ln(1 + e⁻²), of
    mean 1 + ln(1 + e⁻²). Mini-batches of one sample do not matter."""
    samples = share(torch.ones(2, 1), [1, 0])
    client = AFLClient(nn.Linear(1, 2, bias=False), samples, local_steps=1, batch_size=1)
    sent = {"weight": np.array([[2.0], [0.0]], np.float32)}
    _, _, metrics = client.train(sent, {})
    assert metrics["risk"] == pytest.approx(1 + math.log1p(math.exp(-2)))


def test_the_rate_of_the_weights_decays_with_the_other_rates():
    """γ_λ = 0.2 is halved in round 2: Π(½ + 0.1·1, ½ + 0.1·2) = (0.45, 0.55)."""
    strategy = AFL(mixture_lr=0.2, lr_decay=0.25, lr_decay_rounds=2)
    strategy.nodes = [Node(0, 50), Node(1, 51)]
    strategy.now.number = 2
    w = {"w": np.zeros(1)}
    strategy.aggregate({}, [update(0, w, risk=1.0), update(1, w, risk=2.0)])
    assert strategy.mixture == pytest.approx({0: 0.45, 1: 0.55})


def test_clients_of_no_weight_leave_the_model_as_it_is():
    """λ = (0, 0, 1) and the first two were sampled: no mean of theirs is taken."""
    strategy = make(0.0, clients=3)
    strategy.mixture = {0: 0.0, 1: 0.0, 2: 1.0}
    replies = [update(i, {"w": np.array([9.0])}, risk=1.0) for i in (0, 1)]
    assert strategy.aggregate({"w": np.array([4.0])}, replies)["w"].tolist() == [4.0]
    assert strategy.mixture == {0: 0.0, 1: 0.0, 2: 1.0}


def test_the_clients_risk_is_that_without_dropout():
    """W = (2, 0) at x = 1, label 1: ln(1 + e²); with dropout of nearly all inputs ln 2."""
    model = nn.Sequential(nn.Dropout(0.999), nn.Linear(1, 2, bias=False))
    client = AFLClient(model, share(torch.ones(4, 1), [1] * 4), local_steps=1, lr=0.0)
    _, _, metrics = client.train({"1.weight": np.array([[2.0], [0.0]], np.float32)}, {})
    assert metrics["risk"] == pytest.approx(math.log1p(math.exp(2)), rel=1e-5)
