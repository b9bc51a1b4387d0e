"""What Auto's server makes of sums, by numbers worked by hand and against other solvers."""

import numpy as np
import pytest
import scipy

from clients.core.decision.choice import (
    NEVER,
    OUTSIDE,
    UNBOUNDED,
    allowed_share,
    smallest_alpha,
)
from clients.core.decision.logistic import gradient_and_hessian, probabilities
from clients.core.decision.tallies import DESCRIPTOR_VALUES, GUARDS, MISFITS, WIN_RATES, Grid
from strategies.maths import decision


def histogram(grid, values):
    counts = np.zeros(grid.bins)
    for value in values:
        counts[grid.bin_of(value)] += 1
    return counts


def test_quantiles_by_hand():
    """Bins of width 1: of 0.5, 1.5, 1.7, 3.2 half is reached at 2; more than a quarter begins in
    the bin from 1. What lies beyond the grid counts in its last bin."""
    grid = Grid(0, 4, 4)
    counts = histogram(grid, [0.5, 1.5, 1.7, 3.2])
    assert counts.tolist() == [1, 2, 0, 1]
    assert decision.upper_quantile(counts, grid, 0.5) == 2
    assert decision.upper_quantile(counts, grid, 1.2) == 4
    assert decision.lower_quantile(counts, grid, 0.25) == 1
    assert histogram(grid, [-9, 9]).tolist() == [1, 0, 0, 1]


def test_the_threshold_by_hand():
    """T = 0, 0.1, …, 9.9 of 100 newcomers. With 100 clients 0.975·1.01 = 0.985 is reached by the
    99th, 9.8, whose bin ends at 9.85; with 38 clients all must lie below."""
    counts = histogram(MISFITS, np.arange(100) / 10 + 0.01)
    assert decision.misfit_limit(counts, 100) == pytest.approx(9.85)
    assert decision.misfit_limit(counts, 38) == pytest.approx(9.95)


def test_deviations_by_hand():
    """1 and 3: √(10/2 − 2²) = 1. Equal values keep a little."""
    found = decision.deviation(np.array([2.0]), np.array([4.0]), np.array([10.0]))
    assert found.tolist() == [1]
    assert decision.deviation(np.array([2.0]), np.array([4.0]), np.array([8.0])) == 1e-6


def test_ranges_cut_the_outer_newcomers():
    """Of a hundred values 0.025, 0.075, … the lowest two and the highest two lie outside."""
    values = histogram(DESCRIPTOR_VALUES, np.arange(100) / 20 + 0.025)
    cut = np.array([[True, False]])
    found = decision.ranges(np.stack([[values, values]]), cut)
    assert found[0, 0] == pytest.approx([0.1, 4.9])
    assert found[0, 1].tolist() == [-UNBOUNDED, UNBOUNDED]


def test_newtons_steps_reach_the_maximum_of_a_general_solver():
    draw = np.random.default_rng(0)
    features, outcomes = draw.normal(size=(200, 3)), draw.integers(0, 3, 200)

    def loss(flat):
        p = probabilities(features, flat.reshape(2, 3))
        all_p = np.stack([1 - p.sum(1), p[:, 0], p[:, 1]], axis=1)
        return -np.log(all_p[np.arange(200), outcomes]).sum() + decision.PENALTY * flat @ flat / 2

    theta = np.zeros((2, 3))
    for _ in range(decision.STEPS):
        theta = decision.newton_step(theta, *gradient_and_hessian(features, outcomes, theta))
    best = scipy.optimize.minimize(loss, np.zeros(6), options={"gtol": 1e-8})
    np.testing.assert_allclose(theta.ravel(), best.x, atol=1e-5)


def sums_of(points):
    """The sums by bin of (x, y, ω)."""
    sums = np.zeros((WIN_RATES.bins, 6))
    for x, y, w in points:
        sums[WIN_RATES.bin_of(x)] += (1, w, w * x, w * x * x, w * y, w * x * y)
    return sums


def test_the_calibration_is_the_ridge_of_the_newcomers():
    """All x in one bin: none is cut. Against the normal equations of the points."""
    points = [(0.102, 0.3, 4.0), (0.104, 0.1, 2.0), (0.108, -0.2, 5.0)]
    alpha, beta, low, high = decision.calibrated(sums_of(points))
    x, y, w = map(np.array, zip(*points, strict=True))
    rows = np.stack([np.ones(3), x], axis=1)
    normal = rows.T @ (rows * w[:, None]) + 3 * np.eye(2)
    assert [alpha, beta] == pytest.approx(np.linalg.solve(normal, rows.T @ (w * y)))
    assert (low, high) == (pytest.approx(0.10), pytest.approx(0.11))
    assert decision.calibrated(np.zeros((WIN_RATES.bins, 6))).tolist() == [0, 0, 0, 0]


def test_newcomers_beyond_the_range_count_at_its_ends():
    """A hundred newcomers at x = 0.505 with y = 1, and one at each end, ±0.9, which are cut to the
    bin's edges 0.50 and 0.51."""
    points = [(0.505, 1.0, 1.0)] * 100 + [(-0.9, 5.0, 1.0), (0.9, -5.0, 1.0)]
    alpha, beta, low, high = decision.calibrated(sums_of(points))
    assert (low, high) == (pytest.approx(0.50), pytest.approx(0.51))
    x = np.array([0.505] * 100 + [0.50, 0.51])
    y = np.array([1.0] * 100 + [5.0, -5.0])
    rows = np.stack([np.ones(102), x], axis=1)
    expected = np.linalg.solve(rows.T @ rows + 3 * np.eye(2), rows.T @ y)
    assert [alpha, beta] == pytest.approx(expected)


def test_the_guard_by_a_hand_made_table():
    """N = 39, α = 0.1: a sum of losses up to 3 is allowed, (3 + 1)/40 = 0.1. The sums are 5 up to
    k = 0.2, 3 up to 0.4, again 4 at 0.5, then 2: the least k from which all hold is 0.6."""
    losses = np.full(len(GUARDS), 2.0)
    losses[:3], losses[3:5], losses[5] = 5, 3, 4
    many = np.full(len(GUARDS), 30.0)
    assert decision.least_guard(losses, many, 39, 0.1) == pytest.approx(0.6)
    losses[5] = 3
    assert decision.least_guard(losses, many, 39, 0.1) == pytest.approx(0.3)
    losses[-1] = 4
    assert decision.least_guard(losses, many, 39, 0.1) == NEVER


def test_a_guard_by_which_no_newcomer_gets_a_correction_certifies_none():
    """Up to k = 0.9 five of 39 are harmed, which is too many, and from 1 on nobody gets a
    correction: nobody is harmed, whatever a correction does. With one that gets it at 1, k is 1."""
    losses = np.zeros(len(GUARDS))
    corrected = np.zeros(len(GUARDS))
    losses[:10], corrected[:10] = 5, 20
    assert decision.least_guard(losses, corrected, 39, 0.1) == NEVER
    corrected[10] = 0.2
    assert decision.least_guard(losses, corrected, 39, 0.1) == pytest.approx(1)


def test_the_guard_bounds_the_harm_of_those_that_get_a_correction():
    """N = 39, α = 0.1. Of 10 that get one 2 are harmed, more than a tenth, though 2 of 39 are
    allowed where only all count. From k = 0.7 on 1 of 10 is, and from 5 on none of 1."""
    losses = np.full(len(GUARDS), 2.0)
    corrected = np.full(len(GUARDS), 10.0)
    losses[7:50], losses[50:], corrected[50:] = 1, 0, 1
    assert decision.least_guard(losses, corrected, 39, 0.1, of_corrected=True) == pytest.approx(0.7)
    assert decision.least_guard(losses, corrected, 39, 0.1) == 0
    losses[7:50] = 2
    assert decision.least_guard(losses, corrected, 39, 0.1, of_corrected=True) == pytest.approx(5)
    losses[50:] = 1
    assert decision.least_guard(losses, corrected, 39, 0.1, of_corrected=True) == NEVER


def test_no_smaller_share_than_one_client_of_all_is_certified():
    """Without any loss 19 clients certify 1/20 = 0.05, 18 do not."""
    none = np.zeros(len(GUARDS))
    some = np.ones(len(GUARDS))
    assert decision.least_guard(none, some, 19, 0.05) == 0
    assert decision.least_guard(none, some, 18, 0.05) == NEVER
    assert smallest_alpha(19) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("clients", "share"), [(0, 0.05), (10, 0.05), (19, 0.05), (24, 0.04), (39, 0.025), (500, 0.025)]
)
def test_the_default_share_is_half_of_the_limit_or_what_the_clients_certify(clients, share):
    assert allowed_share(0.0, clients) == pytest.approx(share)
    assert allowed_share(0.1, clients) == 0.1
    # Where label shift does not explain the inputs, half of a tenth for any number of clients.
    assert (allowed_share(0.0, clients, OUTSIDE), allowed_share(0.1, clients, OUTSIDE)) == (
        0.05,
        0.1,
    )
    # What the clients certify without a harmed newcomer, they may choose by.
    none = np.zeros(len(GUARDS))
    k = decision.least_guard(none, none + 1, clients, allowed_share(0.0, clients))
    assert k == (0 if clients >= 19 else NEVER)


def test_a_sample_of_later_clients_seldom_exceeds_the_limit():
    """Of 90 clients more than 5 % are harmed with a probability of 0.08 where the share is the
    default, and of 0.47 where it is 5 %."""
    exceeds = scipy.stats.binom(90, allowed_share(0.0, 90)).sf
    assert exceeds(0.05 * 90) == pytest.approx(0.0755, abs=1e-4)
    assert scipy.stats.binom(90, 0.05).sf(0.05 * 90) == pytest.approx(0.4703, abs=1e-4)


def test_the_guard_keeps_its_promise_for_exchangeable_clients():
    """Of clients drawn like the played ones at most α is harmed in the mean: losses whose chance
    falls with k, 60 clients, 400 repetitions."""
    draw = np.random.default_rng(0)
    chances = 0.4 * np.exp(-GUARDS / 2)
    harm = []
    for _ in range(400):
        hurt = draw.random((60, 1)) < chances  # a client that k harms, a lower k harms as well
        k = decision.least_guard(hurt.sum(0).astype(float), np.full(len(GUARDS), 60.0), 60, 0.1)
        harm.append(float(chances[np.searchsorted(GUARDS, k)]) if k != NEVER else 0.0)
    assert np.mean(harm) <= 0.1 and np.mean(harm) > 0.06


@pytest.mark.parametrize(
    ("reached", "size"),
    [([100, 9, 0], 20), ([100, 10, 9], 50), ([100, 40, 10], 100), ([7, 0, 0], 20), ([0, 0, 0], 20)],
)
def test_the_largest_size_is_one_that_a_tenth_of_the_newcomers_have(reached, size):
    assert decision.largest_size(np.array(reached, float)) == size
