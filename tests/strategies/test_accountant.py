"""ε against closed forms, published figures, and a second accountant (Rényi)."""

import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from strategies.core import accountant
from strategies.core.accountant import central_epsilon, local_epsilon, local_loss, multiplier


def renyi(z, q, rounds, delta):
    """ε of the older accountant, an upper bound that is less tight."""
    accountant = RdpAccountant()
    event = SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(z)), rounds)
    return float(accountant.compose(event).get_epsilon(delta))


def delta_of(epsilon, ratio):
    """δ of a Gaussian mechanism whose sensitivity is `ratio` deviations, Balle and Wang, ICML
    2018, Theorem 8."""
    a, b = ratio / 2, epsilon / ratio
    return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b)


def test_one_round_of_everybody_is_a_gaussian_mechanism():
    """A user added or removed moves the sum by C, z = 4: 1/4 of a deviation. One whose update is
    replaced moves it by 2C: 1/2."""
    assert delta_of(central_epsilon({(4.0, 1.0): 1}, 1e-6), 1 / 4) == pytest.approx(1e-6, rel=1e-3)
    assert delta_of(local_epsilon(local_loss(4.0), 1e-6), 1 / 2) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("z", "q", "rounds", "epsilon"), [(0.5, 1 / 9, 30, 19.6), (1.0, 0.1, 60, 5.57)]
)
def test_privacy_loss_distributions_lie_just_below_renyi(z, q, rounds, epsilon):
    found = central_epsilon({(z, q): rounds}, 1e-5)
    assert found == pytest.approx(epsilon, rel=2e-3)
    assert 0.8 * renyi(z, q, rounds, 1e-5) < found < renyi(z, q, rounds, 1e-5)


def test_all_rounds_count_and_of_every_kind(monkeypatch):
    """One round composed instead of all, or one kind instead of both, gives a smaller ε. Losses are
    discretised coarsely, for speed."""
    for name in ("FINE", "COARSE"):
        monkeypatch.setattr(accountant, name, 1e-2)
    one, all_, both = (
        central_epsilon(rounds, 1e-5)
        for rounds in ({(1.0, 0.1): 1}, {(1.0, 0.1): 40}, {(1.0, 0.1): 40, (0.8, 0.2): 5})
    )
    assert one < 0.6 * all_
    assert all_ < 0.9 * both
    assert central_epsilon({}, 1e-5) == 0


def test_multiplier_is_the_smallest_that_keeps_the_target():
    """μ = 2√50/z, so with ε(z) = local_epsilon(μ²) the inverse is exact."""
    z = multiplier(lambda z: local_epsilon(50 * local_loss(z), 1e-5), 3.0)
    assert local_epsilon(50 * local_loss(z), 1e-5) <= 3.0
    assert local_epsilon(50 * local_loss(z / 1.002), 1e-5) > 3.0
    with pytest.raises(ValueError, match="no noise keeps ε = 1"):
        multiplier(lambda z: 2.0, 1.0)


def test_rounds_without_sampling_add_up_by_hand():
    """Nine rounds at z = 2 and four at 3: μ² = 9/4 + 4/9, and Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) is
    δ. Poisson sampling at a tenth hides most of it."""
    rounds = {(2.0, 1.0): 9, (3.0, 1.0): 4}
    epsilon, mu = central_epsilon(rounds, 1e-5), math.sqrt(9 / 4 + 4 / 9)
    found = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert found == pytest.approx(1e-5, rel=1e-4)
    assert central_epsilon({(z, 0.1): n for (z, _), n in rounds.items()}, 1e-5) < epsilon / 4
