"""Auto's equations on the client, by numbers worked by hand and identities."""

from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
import scipy
import torch

from clients.core.decision import choice, evidence, tallies
from clients.core.decision import fit as fit_module
from clients.core.decision.changes import (
    COLUMN_CHANGES,
    EVERY,
    IMAGE_CHANGES,
    Changer,
    named_changes,
)
from clients.core.decision.choice import (
    KEEP,
    LABEL_SHIFT,
    NEVER,
    OUTSIDE,
    Case,
    Rule,
    best,
    decide,
)
from clients.core.decision.fit import (
    MOST_SHARED,
    LabelShiftFit,
    Statistics,
    nearest_mixture,
    shared_fit,
)
from clients.core.decision.inner_values import look
from clients.core.decision.logistic import gradient_and_hessian, probabilities
from clients.core.decision.moments import (
    Blocks,
    between_clients,
    class_means,
    class_sums,
    positive_part,
    residual,
    within_classes,
)
from clients.core.decision.played import newcomers, proportions, rows_of_proportions

# Moments


def test_moments_by_hand():
    """φ = 1, 3 of class 0 and 10 of class 1: M = 2, 10; class 2 without a sample gets 14/3.
    S = (1 + 9 + 100 − 2·2² − 10²) / (3 − 2) = 2."""
    phi, y = np.array([[1.0], [3.0], [10.0]]), np.array([0, 0, 1])
    counts, sums = class_sums(phi, y, 3)
    means = class_means(counts, sums)
    assert counts.tolist() == [2, 1, 0]
    assert means[:, 0] == pytest.approx([2, 10, 14 / 3])
    blocks = Blocks((1,))
    assert within_classes(counts, means, blocks.second_moments(phi), blocks) == pytest.approx([2])


def test_residuals_and_the_covariance_between_clients_by_hand():
    """φ = 4, 6, 8 of the classes 0, 1, 1 with M = 1, 4: r = 6 − 3 = 3. Of r² = 9, mean 1/n = ½ and
    S = 4 remains 7; of r² = 1 nothing, as the positive part of −1."""
    means = np.array([[1.0], [4.0]])
    assert residual(np.array([[4.0], [6.0], [8.0]]), np.array([0, 1, 1]), means).tolist() == [3]
    blocks = Blocks((1,))
    assert between_clients(np.array([9.0]), 0.5, np.array([4.0]), blocks) == pytest.approx([7])
    assert between_clients(np.array([1.0]), 0.5, np.array([4.0]), blocks) == pytest.approx([0])
    turn = np.array([[3.0, 4.0], [-4.0, 3.0]]) / 5
    part = positive_part(turn @ np.diag([2.0, -1.0]) @ turn.T)
    assert part == pytest.approx(turn @ np.diag([2.0, 0.0]) @ turn.T)


def test_moments_of_clients_are_those_of_the_pooled_samples():
    draw = np.random.default_rng(0)
    blocks = Blocks((3, 2))
    phi, y = draw.normal(size=(60, 5)), draw.integers(0, 4, 60)
    pooled = (*class_sums(phi, y, 4), blocks.second_moments(phi))
    total = [0.0, 0.0, 0.0]
    for rows in np.split(np.arange(60), [10, 35]):
        parts = (*class_sums(phi[rows], y[rows], 4), blocks.second_moments(phi[rows]))
        total = [a + b for a, b in zip(total, parts, strict=True)]
    for a, b in zip(total, pooled, strict=True):
        np.testing.assert_allclose(a, b)
    counts, sums, squares = total
    means = class_means(counts, sums)
    first, second = blocks.matrices(within_classes(counts, means, squares, blocks))
    centred = phi - means[y]
    np.testing.assert_allclose(first, centred[:, :3].T @ centred[:, :3] / 56, atol=1e-12)
    np.testing.assert_allclose(second, centred[:, 3:].T @ centred[:, 3:] / 56, atol=1e-12)


# Fit


def test_a_mixture_in_the_simplex_is_found_exactly():
    """Columns (0, 0), (1, 0), (0, 1): (0.2, 0.3) is 0.5, 0.2, 0.3; (1, 1) is nearest to the middle
    of the second and the third; (−1, −2) to the first."""
    columns = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    for target, q in (
        ((0.2, 0.3), (0.5, 0.2, 0.3)),
        ((1, 1), (0, 0.5, 0.5)),
        ((-1, -2), (1, 0, 0)),
    ):
        assert nearest_mixture(columns, np.array(target, float)) == pytest.approx(q)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_quadratic_program_agrees_with_a_general_solver(scale):
    draw = np.random.default_rng(1)
    for _ in range(5):
        columns, target = scale * draw.normal(size=(8, 5)), scale * draw.normal(size=8)

        def distance(q, columns=columns, target=target):
            return np.square((columns @ q - target) / scale).sum()

        q = nearest_mixture(columns, target)
        assert q.min() >= 0 and q.sum() == pytest.approx(1)
        simplex = {"type": "eq", "fun": lambda q: q.sum() - 1}
        options = {"ftol": 1e-12, "maxiter": 500}
        other = scipy.optimize.minimize(
            distance, np.full(5, 0.2), bounds=[(0, 1)] * 5, constraints=simplex, options=options
        )
        np.testing.assert_allclose(q, other.x, atol=1e-4)
        assert distance(q) <= other.fun + 1e-9


def statistics(means, within, between, sizes):
    classes = len(means)
    return Statistics(
        Blocks(sizes),
        np.asarray(means, float),
        np.asarray(within, float),
        np.asarray(between, float),
        np.eye(classes),
        np.full(classes, 1 / classes),
        np.ones(classes, bool),
    )


def test_a_class_without_a_sample_explains_no_client():
    """Two classes have the means 0 and 1. The first, without a sample, has that of all, ½: it
    would explain φ̄ = ½ alone. Half of each other class does."""
    given = statistics([[0.5] * 3, [0] * 3, [1] * 3], [1] * 3, [0] * 3, (1, 1, 1))
    given = replace(given, present=np.array([False, True, True]))
    q = LabelShiftFit(given, 4).proportions(np.full(3, 0.5))
    np.testing.assert_allclose(q, [0, 0.5, 0.5], atol=1e-9)


def test_misfit_by_hand():
    """One value in two blocks and two in the last, M = 0 and 1, S = 4, B = 1, n = 4, so that
    Σ = (1 + 4/4)·1.03. For φ̄ = 3 the nearest class is 1, and T = log(2² / 2.06), of the last block
    log(2·10² / 2 / 2.06); for φ̄ = ¼ it is a mixture, nearly without misfit. The last block decides
    no q."""
    within, between = ([d, d, d, 0, 0, d] for d in (4, 1))
    given = statistics([[0] * 4, [1] * 4], within, between, (1, 1, 2))
    fit = LabelShiftFit(given, 4)
    mean = np.array([3.0, 3.0, -9.0, -9.0])
    q = fit.proportions(mean)
    assert q == pytest.approx([0, 1])
    assert fit.misfits(mean, q) == pytest.approx(np.log(np.array([4, 4, 100]) / 2.06))
    mean = np.full(4, 0.25)
    q = fit.proportions(mean)
    assert q == pytest.approx([0.75, 0.25])
    assert fit.misfits(mean, q).max() < -20


def test_clients_share_the_fits_of_the_same_statistics_alone():
    def given(between):
        return statistics([[0] * 3, [1] * 3], [4] * 3, [between] * 3, (1, 1, 1))

    first = shared_fit(given(1), 4)
    assert shared_fit(given(1), 4) is first and shared_fit(given(1), 5) is not first
    other = shared_fit(given(2), 4)
    mean = np.array([3.0, 3.0, 3.0])
    q = np.array([0.5, 0.5])
    assert other.misfits(mean, q).tolist() == LabelShiftFit(given(2), 4).misfits(mean, q).tolist()
    assert other.misfits(mean, q).tolist() != first.misfits(mean, q).tolist()
    for n in range(5, 5 + MOST_SHARED):
        shared_fit(given(2), n)
    assert shared_fit(given(2), 4) is not other


def test_fits_of_equal_statistics_hold_them_once_and_few_are_kept_of_wide_networks(monkeypatch):
    """Two fits of 3 products each, at 12 numbers in all; one fit is kept at least."""

    def given(between):
        return statistics([[0] * 3, [1] * 3], [4] * 3, [between] * 3, (1, 1, 1))

    first, second = shared_fit(given(3), 4), shared_fit(given(3), 5)
    assert first.statistics is second.statistics
    for numbers, kept in ((12, 2), (11, 1), (1, 1)):
        monkeypatch.setattr(fit_module, "MOST_SHARED_NUMBERS", numbers)
        for n in range(6, 9):
            newest = shared_fit(given(3), n)
        assert len(fit_module._shared) == kept and fit_module._shared[-1] is newest


def test_threads_that_serve_two_runs_get_the_fits_of_their_own(monkeypatch):
    """Another thread asks for the other run's fit between the comparison and the answer."""
    one, two = (statistics([[0] * 3, [1] * 3], [4] * 3, [b] * 3, (1, 1, 1)) for b in (1, 2))
    shared_fit(one, 4)
    given = []
    other = Thread(target=lambda: given.append(shared_fit(two, 4)))

    def compare_slowly(self, statistics):
        """As `equals`, and gives the other thread time."""
        same = np.array_equal(self.between, statistics.between)
        if not other.ident:
            other.start()
            other.join(0.2)
        return same

    monkeypatch.setattr(Statistics, "equals", compare_slowly)
    assert np.array_equal(shared_fit(one, 4).statistics.between, one.between)
    other.join()
    assert np.array_equal(given[0].statistics.between, two.between)


def drawn_clients(draw, means, q, n, count, moved=0.0):
    """φ̄ of clients whose classes have the proportions q, S = I; each entry moved."""
    clients = []
    for _ in range(count):
        y = draw.choice(len(q), n, p=q)
        clients.append((means[y] + draw.normal(size=(n, means.shape[1])) + moved).mean(0))
    return np.array(clients)


def test_other_proportions_alone_are_found_and_fit_and_other_inputs_do_not():
    """The threshold is that of clients with the training proportions. Clients with three tenths, no
    and seven tenths of the classes stay below it, those whose inputs moved do not."""
    draw = np.random.default_rng(0)
    means = 2 * draw.normal(size=(3, 9))
    given = statistics(means, np.tile(np.eye(3).ravel(), 3), np.zeros(27), (3, 3, 3))
    fit = LabelShiftFit(given, 100)

    def misfit(mean):
        return fit.misfits(mean, fit.proportions(mean))

    played = np.array([misfit(m) for m in drawn_clients(draw, means, [1 / 3] * 3, 100, 200)])
    rule = Rule(misfit_mean=played.mean(0), misfit_deviation=played.std(0))
    cases = [Case(100, t, np.zeros((0, 4)), [], unchanged=True) for t in played]
    histogram = tallies.histograms(rule, cases, 0)["misfits"]
    assert histogram.sum() == 200
    limit = tallies.MISFITS.edges[1:][np.cumsum(histogram) >= 199][0]
    q = [0.3, 0.0, 0.7]
    shifted = drawn_clients(draw, means, q, 100, 50)
    found = np.array([fit.proportions(mean) for mean in shifted])
    np.testing.assert_allclose(found.mean(0), q, atol=0.03)
    others = drawn_clients(draw, means, q, 100, 50, moved=0.7)
    below = [rule.misfit(Case(100, misfit(m), np.zeros((0, 4)), [])) <= limit for m in shifted]
    above = [rule.misfit(Case(100, misfit(m), np.zeros((0, 4)), [])) > limit for m in others]
    assert np.mean(below) > 0.95
    assert all(above)


# Newcomers

IMAGES = torch.rand(30, 2, 9, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", IMAGE_CHANGES)
def test_a_change_of_images_stays_in_the_range_and_follows_its_draw(name):
    x = 4 * IMAGES - 1
    changer = Changer(x)
    change = IMAGE_CHANGES[name]
    one, again, other = (changer(change, x, np.random.default_rng(s)) for s in (0, 0, 1))
    assert one.shape == x.shape and one.isfinite().all()
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert (one - x).abs().max() > 0.05
    low, high = x.amin((0, 2, 3)), x.amax((0, 2, 3))
    assert (one.amin((0, 2, 3)) >= low - 1e-5).all() and (one.amax((0, 2, 3)) <= high + 1e-5).all()


@pytest.mark.parametrize("name", COLUMN_CHANGES)
@pytest.mark.parametrize("shape", [(40, 5), (40, 5, 6)])
def test_a_change_of_columns_is_in_their_deviations(name, shape):
    """A column times 1000 changes by 1000 times as much; a constant one hardly changes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[:, 3] = 7.0
    large = x.clone()
    large[:, 0] *= 1000
    change = COLUMN_CHANGES[name]
    small_one, large_one = (
        Changer(inputs)(change, inputs, np.random.default_rng(2)) for inputs in (x, large)
    )
    torch.testing.assert_close(large_one[:, 0], 1000 * small_one[:, 0], rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(large_one[:, 1:], small_one[:, 1:])
    assert (small_one[:, 1] - x[:, 1]).abs().max() > 0.01
    assert (small_one[:, 3] - 7).abs().max() < 1e-4


def test_changes_are_named_by_the_inputs_kind():
    assert len(named_changes(EVERY, 4)) == 13 and len(named_changes(EVERY, 2)) == 3
    assert named_changes("blur,column-noise", 4) == [IMAGE_CHANGES["blur"]]
    assert named_changes(EVERY, 2, whole=True) == []  # tokens
    assert named_changes("blur", 3) == named_changes("column-noise", 2, whole=True) == []
    with pytest.raises(ValueError, match=r"auto\.changes names 'fog'; known: gaussian, salt"):
        named_changes("fog", 4)


def test_proportions_are_over_the_classes_that_there_are():
    draw = np.random.default_rng(0)
    present = np.array([True, False, True, True, True])
    drawn = np.array([proportions(present, draw) for _ in range(400)])
    np.testing.assert_allclose(drawn.sum(1), 1)
    assert (drawn >= 0).all() and not drawn[:, 1].any()
    equal = [np.unique(q[q > 0]).size == 1 for q in drawn]
    assert 0.5 < np.mean(equal) < 0.75  # three of five kinds, and few Dirichlet draws of one class
    assert {int((q > 0).sum()) for q in drawn[equal]} >= {1, 2, 3}


def test_rows_by_proportions_are_never_drawn_twice():
    """Ten of class 0 alone are asked, and four exist: four rows. Half and half: four and five."""
    y = np.array([0] * 4 + [1] * 40)
    draw = np.random.default_rng(0)
    assert sorted(rows_of_proportions(y, np.array([1.0, 0.0]), 10, draw)) == [0, 1, 2, 3]
    for _ in range(20):
        rows = rows_of_proportions(y, np.array([0.5, 0.5]), 10, draw)
        assert len(set(rows)) == len(rows) <= 10 and (y[rows] == 0).sum() <= 4


def test_newcomers_are_the_clients_samples_some_unchanged():
    """Each unchanged input is one of the samples, under its own label; others are not."""
    x, y = IMAGES, torch.arange(30) % 3
    made = list(newcomers(x, y, 3, 40, named_changes("inversion", 4), seed=0))
    again = list(newcomers(x, y, 3, 40, named_changes("inversion", 4), seed=0))
    assert all(torch.equal(a.x, b.x) for a, b in zip(made, again, strict=True))
    assert 0.2 < np.mean([newcomer.unchanged for newcomer in made]) < 0.6
    labels = {sample.numpy().tobytes(): int(label) for sample, label in zip(x, y, strict=True)}
    for newcomer in made:
        assert 2 <= len(newcomer.x) <= 30
        for sample, label in zip(newcomer.x, newcomer.y, strict=True):
            known = labels.get(sample.numpy().tobytes())
            assert known == (int(label) if newcomer.unchanged else None)
    assert all(made.unchanged for made in newcomers(x, y, 3, 5, [], seed=0))
    assert list(newcomers(x[:19], y[:19], 3, 5, [], seed=0)) == []
    # Thirty samples are held out: no newcomer has 50.
    assert max(len(made.y) for made in newcomers(x, y, 3, 50, [], seed=0)) == 20


# Evidence


def test_evidence_by_hand():
    """Sample 0 goes from class 0 to 1, sample 1 stays. Another view has log-odds −100, cut to −7.
    On sample 0 the candidate is right for label 1, FedAvg for 0, nobody for 2."""
    base = np.log([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
    views = {
        "bbse": np.log([[0.2, 0.5, 0.3], [0.5, 0.4, 0.1]]),
        "bn16": np.array([[-1e-9, -100.0, -50.0], [0.0, -1.0, -2.0]]),
    }
    rows = evidence.changed_rows(base, views["bbse"])
    assert rows.tolist() == [0]
    found = evidence.sample_evidence(base, views, "bbse", rows)
    expected = [np.log(0.3 / 0.6), np.log(0.5 / 0.2), np.log(0.6), np.log(0.5), -7]
    assert found == pytest.approx(np.array([expected]))
    for label, right in ((1, evidence.CANDIDATE), (0, evidence.BASE), (2, evidence.NEITHER)):
        y = np.array([label, 0])
        assert evidence.outcomes(base, views["bbse"], rows, y).tolist() == [right]


def test_descriptors_by_hand():
    """H(½, ½, 0) = log 2, plus (3 − 1)/(2·10); |q − q'|₁ = 0.4; entropies log 2 and 0 fall by
    log 2."""
    q, other = np.array([0.5, 0.5, 0.0]), np.array([0.3, 0.5, 0.2])
    found = evidence.label_shift_descriptor(q, other, -1.5, 10, 0.2)
    assert found == pytest.approx([np.log(2) + 0.1, 0.4, -1.5, np.log(0.21)])
    half, sure = np.log([[0.5, 0.5]] * 4), np.log([[1 - 1e-12, 1e-12]] * 4)
    found = evidence.statistics_descriptor(np.array([1.0, 0.0]), half, sure, 0.5)
    assert found == pytest.approx([np.log(4), 1 / 8, np.log(2), np.log(0.51)], abs=1e-9)


# Logistic model


def test_the_logistic_gradient_and_hessian_are_finite_differences():
    draw = np.random.default_rng(0)
    features, theta = draw.normal(size=(30, 3)), draw.normal(size=(2, 3))
    outcomes = draw.integers(0, 3, 30)

    def likelihood(flat):
        p = probabilities(features, flat.reshape(2, 3))
        all_p = np.stack([1 - p.sum(1), p[:, 0], p[:, 1]], axis=1)  # neither, candidate, FedAvg
        return np.log(all_p[np.arange(30), outcomes]).sum()

    gradient, hessian = gradient_and_hessian(features, outcomes, theta)
    flat, step = theta.ravel(), 1e-5
    for k, unit in enumerate(step * np.eye(6)):
        slope = (likelihood(flat + unit) - likelihood(flat - unit)) / (2 * step)
        assert gradient[k] == pytest.approx(slope, abs=1e-6)
        above, below = (
            gradient_and_hessian(features, outcomes, (flat + s * unit).reshape(2, 3))[0]
            for s in (1, -1)
        )
        np.testing.assert_allclose(-hessian[k], (above - below) / (2 * step), atol=1e-5)


def test_probabilities_by_hand():
    """Logits log 2 and log 5 beside 0: 2/8 and 5/8. Very large ones do not overflow."""
    theta = np.array([[np.log(2)], [np.log(5)]])
    assert probabilities(np.ones((1, 1)), theta) == pytest.approx(np.array([[0.25, 0.625]]))
    assert probabilities(np.full((1, 1), 1e4), theta) == pytest.approx(np.array([[0, 1]]))
    assert probabilities(np.full((1, 1), -1e4), theta) == pytest.approx(np.array([[0, 0]]))


# Choice


@pytest.mark.parametrize(
    ("win_rates", "able", "k", "expected"),
    [
        ([0.5, 0.2], [True, True], 0, 1),  # d w = 0.05 and 0.08: the second
        ([0.5, 0.2], [True, False], 0, 0),
        ([0.5, 0.2], [False, False], 0, KEEP),
        ([0.5, -0.2], [False, True], 0, KEEP),
        ([0.5, 0.2], [True, True], 1.4, 0),  # w √(n d) = 1.58 and 1.26
        ([0.5, 0.2], [True, True], 1.6, KEEP),
        ([0.04, 0.01], [True, True], 0, KEEP),  # n d w = 0.4 inputs
        ([0.06, 0.01], [True, True], 0, 0),  # 0.6 inputs
    ],
)
def test_the_choice_by_hand(win_rates, able, k, expected):
    """n = 100, and the candidates change 10 and 40 of them."""
    changed = np.array([0.1, 0.4])
    ks = np.array([NEVER, k])
    choices = best(100, changed, np.array(win_rates), np.array(able), ks)
    assert choices.tolist() == [KEEP, expected]


NOTHING, LOST, WON = 0, evidence.BASE, evidence.CANDIDATE


def simple_case(
    n=100, misfits=(0.0,), outcomes=((WON, NOTHING), (LOST, LOST, WON)), *, unchanged=True
):
    """A case of the candidates bbse and bn16 with one entry of evidence, 1."""
    rows = [np.array(right) for right in outcomes]
    ones = [np.ones((len(right), 1)) for right in rows]
    return Case(n, np.array(misfits), np.zeros((2, 4)), ones, rows, unchanged)


def simple_rule(alphas=((0.5, 0.2), (0.5, 0.2)), **changes):
    """w is α, by regime and candidate, whatever the evidence is; t = 2, k = 0."""
    calibration = np.zeros((2, 2, 4))
    calibration[..., 0] = alphas
    numbers = {
        "misfit_mean": np.array([1.0]),
        "misfit_deviation": np.array([2.0]),
        "misfit_limit": np.array(2.0),
        "ranges": np.tile([-9.0, 9.0], (2, 4, 1)),
        "feature_mean": np.zeros((2, 5)),
        "feature_deviation": np.ones((2, 5)),
        "coefficients": np.zeros((2, 2, 6)),
        "calibration": calibration,
        "guard": np.zeros(2),
    }
    return Rule(**numbers | changes)


def test_the_regime_decides_the_candidates():
    """T = (5 − 1)/2 = 2 is at the threshold: label shift, where BBSE has d w = 0.01, and 0.006 for
    BN. Beyond, BBSE is none."""
    names = ("bbse", "bn16")
    at, beyond = (decide(simple_rule(), simple_case(misfits=[t]), names) for t in (5.0, 5.1))
    assert (at.misfit, at.regime, at.choice) == (2.0, LABEL_SHIFT, 0)
    assert (beyond.regime, beyond.choice) == (OUTSIDE, 1)
    guarded = simple_rule(guard=np.array([9.0, 0.0]))
    assert decide(guarded, simple_case(misfits=[5.0]), names).choice == KEEP


def test_an_unchanged_client_is_left_alone():
    """Where no prediction changes nothing can be won, whatever the rule expects."""
    case = simple_case(outcomes=((), ()))
    assert decide(simple_rule(), case, ("bbse", "bn16")).choice == KEEP


def test_win_rates_by_hand():
    """Evidence 1, mean 0.5, deviation 0.25: 2, and the constant. θ = (log 2)/2, (log 5)/2 on the
    evidence: P = 2/8, 5/8, so w̃ = −3/8, cut to −1/4; w = 0.1 + 2·(−1/4). Evidence of 4 deviations
    beyond 5 counts as 5."""
    theta = np.zeros((2, 2, 6))
    theta[:, :, 0] = np.log([2, 5]) / 2
    mean, deviation = np.zeros((2, 5)), np.ones((2, 5))
    mean[:, 0], deviation[:, 0] = 0.5, 0.25
    calibration = np.tile([0.1, 2.0, -0.25, 1.0], (2, 2, 1))
    rule = simple_rule(
        coefficients=theta, feature_mean=mean, feature_deviation=deviation, calibration=calibration
    )
    assert rule.raw_win_rate(simple_case(), 0) == pytest.approx(-3 / 8)
    assert rule.win_rates(simple_case()) == pytest.approx([-0.4, -0.4])
    far = simple_rule(feature_deviation=np.full((2, 5), 1e-3))
    assert far.features(simple_case(), 0).max() == 5
    low = simple_rule(ranges=np.tile([0.5, 9.0], (2, 4, 1)))
    assert low.raw_features(simple_case(), 0)[:, 1:].tolist() == [[0.5] * 4] * 2


@pytest.mark.parametrize(
    ("n", "lost", "harmed"),
    [
        (20, 0, False),
        (20, 1, True),
        (100, 1, False),
        (101, 1, False),
        (300, 3, False),
        (300, 4, True),
    ],
)
def test_harm_is_more_than_a_point(n, lost, harmed):
    case = simple_case(n, outcomes=((WON,) + (LOST,) * (lost + 1), ()))
    assert case.inputs_lost(0) == lost and case.harmed(0) is harmed
    assert not case.harmed(KEEP)


def test_the_harm_of_each_k_by_hand():
    """BN changes 16 of 100 inputs with w = 0.5: w √(n d) = 2, chosen up to k = 2. It loses 4. The
    other newcomers win 16, and lose 1 of 3, so that w √(n d) = 0.87."""
    case = simple_case(misfits=[9.0], outcomes=((), (LOST,) * 10 + (WON,) * 6))
    rule = simple_rule(alphas=((0, 0), (0, 0.5)))
    grid = np.array([0, 1, 2, 2.1])
    lost = choice.choices_by_k(rule, case, ("bbse", "bn16"), grid)
    assert lost.regime == OUTSIDE
    assert lost.harmed.tolist() == lost.corrected.tolist() == [1, 1, 1, 0]
    assert lost.gain.tolist() == [-0.04, -0.04, -0.04, 0]
    won = simple_case(misfits=[9.0], outcomes=((), (WON,) * 16))
    won_by_k = choice.choices_by_k(rule, won, ("bbse", "bn16"), grid)
    assert won_by_k.corrected.tolist() == [1, 1, 1, 0] and not won_by_k.harmed.any()
    assert won_by_k.gain.tolist() == [0.16, 0.16, 0.16, 0]
    losses = tallies.guard_losses(rule, [case, simple_case(misfits=[9.0])], ("bbse", "bn16"))
    assert losses["clients"].tolist() == [0, 1]
    assert losses["loss"][OUTSIDE, [0, 20, 21]].tolist() == [0.5, 0.5, 0]
    assert losses["corrected"][OUTSIDE, [0, 8, 9, 20, 21]].tolist() == [1, 1, 0.5, 0.5, 0]
    assert losses["gain"][OUTSIDE, [9, 20, 21]].tolist() == [-0.02, -0.02, 0]


def test_newcomers_of_fewer_inputs_than_a_choice_needs_do_not_count_for_the_guard():
    """One of 20 inputs loses one, and is harmed by k = 0. One of 19 loses nothing: it would halve
    the harm. Alone it leaves its client without a newcomer."""
    rule = simple_rule(alphas=((0.5, 0), (0.5, 0)))
    lost = simple_case(20, outcomes=((LOST, LOST, WON), ()))
    few = simple_case(19, outcomes=((WON, WON), ()))
    losses = tallies.guard_losses(rule, [lost, few], ("bbse", "bn16"))
    assert losses["loss"][LABEL_SHIFT, 0] == losses["corrected"][LABEL_SHIFT, 0] == 1
    assert losses["gain"][LABEL_SHIFT, 0] == -0.05
    alone = tallies.guard_losses(rule, [few], ("bbse", "bn16"))
    assert alone["clients"].tolist() == [0, 0] and not alone["corrected"].any()


def test_cases_survive_the_state():
    cases = [simple_case(), simple_case(20, outcomes=((), (LOST,)))]
    for before, after in zip(cases, choice.cases_of(choice.cases_to_arrays(cases, 2)), strict=True):
        assert (before.n, before.unchanged) == (after.n, after.unchanged)
        for name in ("misfits", "descriptors"):
            assert np.array_equal(getattr(before, name), getattr(after, name))
        for name in ("evidence", "outcomes"):
            pairs = zip(getattr(before, name), getattr(after, name), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)
    assert choice.cases_of(choice.cases_to_arrays([], 2)) == []


def test_candidates_are_those_that_the_network_allows():
    assert choice.candidates_of("bbse,bn16,bbse", True) == ("bbse", "bn16")
    assert choice.candidates_of("bbse,bn16", False) == ("bbse",)
    assert choice.candidates_of("tent, bn16", False) == ("tent",)
    with pytest.raises(ValueError, match="with running statistics; add mean-matching"):
        choice.candidates_of("bn16", False)


def test_only_newcomers_with_unchanged_inputs_set_the_threshold():
    """T = 1 and 3 of two, 9 of one whose inputs changed: Σ T = 4, Σ T² = 10. With μ = 1 and σ = 2
    they are 0 and 1, in the bins from 0 and from 1. Descriptors, all 0, are of all three; of BBSE
    of two, as the third changes no prediction."""
    cases = [simple_case(misfits=[1.0]), simple_case(misfits=[3.0])]
    cases.append(simple_case(misfits=[9.0], outcomes=((), (WON,)), unchanged=False))
    sums = tallies.misfit_sums(cases, 1)
    assert [sums[name].tolist() for name in ("count", "sum", "square")] == [[2], [4], [10]]
    counts = tallies.histograms(simple_rule(), cases, 2)
    filled = np.flatnonzero(counts["misfits"])
    assert tallies.MISFITS.edges[filled] == pytest.approx([0, 1])
    assert counts["descriptors"].sum(2).tolist() == [[2] * 4, [3] * 4]


def test_newcomers_are_counted_by_size():
    """Of 19, 20, 49, 50 and 120 inputs: four have 20 or more, two 50, one 100."""
    counts = tallies.size_counts([simple_case(n) for n in (19, 20, 49, 50, 120)])
    assert counts["sizes"].tolist() == [4, 2, 1]


def test_sums_of_clients_are_those_of_all_newcomers():
    """Of every exchange, by two clients and by one who has both clients' newcomers."""
    one, other = [simple_case(), simple_case(20, [7.0])], [simple_case(50, [3.0])]
    rule = simple_rule()
    theta = np.random.default_rng(0).normal(size=(2, 3, 2, 6))
    sums = (
        lambda cases: tallies.misfit_sums(cases, 1),
        tallies.size_counts,
        lambda cases: tallies.histograms(rule, cases, 2),
        lambda cases: tallies.feature_sums(rule, cases, 2, 6),
        lambda cases: tallies.derivatives(rule, cases, theta),
        lambda cases: tallies.calibration_sums(rule, cases, 2),
    )
    for of in sums:
        first, second, pooled = of(one), of(other), of(one + other)
        for name, total in pooled.items():
            np.testing.assert_allclose(first[name] + second[name], total, err_msg=name)
            assert of([])[name].shape == total.shape and not of([])[name].any()


def test_the_look_of_an_input_by_hand():
    """Rows (1, 3) and (−5, 1): mean 0, squares 1 + 9 + 25 + 1 = 36, so the deviation is 3; steps of
    2 and 6. What is not finite counts as 0. One column has no neighbours and no deviation."""
    x = torch.tensor([[[1.0, 3.0], [-5.0, 1.0]], [[0.0, 0.0], [4.0, float("nan")]]])
    assert look(x).tolist() == [[0, 3, 5, 4], [1, pytest.approx(3**0.5), 4, 2]]
    assert look(torch.tensor([[7.0]])).tolist() == [[7, 0, 7, 0]]
    tokens = torch.tensor([[2, 4]])
    assert look(tokens).tolist() == [[3, 1, 4, 2]]


@pytest.mark.parametrize("change", ["brightness", "contrast", "gaussian", "blur", "inversion"])
def test_the_look_moves_with_changes_of_images(change):
    """By more than a deviation over the images."""
    x = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)).square()
    (named,) = named_changes(change, 4)
    changed = look(Changer(x)(named, x.clone(), np.random.default_rng(0)))
    moved = (changed.mean(0) - look(x).mean(0)).abs() / look(x).std(0)
    assert moved.max() > 1
