"""Limits of counts, by hand."""

import numpy as np
import pytest
from small_runs import update

from clients.core.decision.moments import Blocks, semidefinite, within_classes
from strategies.core.count_limits import (
    bounded_confusions,
    bounded_deviations,
    bounded_totals,
    num_trimmed,
    without_highest,
)
from strategies.core.replies import Node
from strategies.maths.decision import PENALTY
from strategies.methods import auto
from strategies.methods.bbse import BBSE
from strategies.methods.prior_em import PriorEM

HONEST = np.diag([10.0, 10.0])
PERMUTED = HONEST[::-1]


def test_totals_are_at_most_a_multiple_of_the_lower_median():
    """Totals 10, 12, 14 and 990: the lower median is 12, its triple 36. −5 is 0."""
    counts = [np.array(c, float) for c in ([4, 6], [12, -5], [7, 7], [990, 0])]
    bounded = bounded_totals(counts, 3)
    assert [b.tolist() for b in bounded] == [[4, 6], [12, 0], [7, 7], [36, 0]]


def test_totals_of_zero_are_no_measure():
    """Of the totals 4, 4 and 990 that are no 0, the lower median is 4, its triple 12."""
    counts = [
        np.array(c, float) for c in ([0, 0], [0, 0], [0, 0], [0, 0], [4, 0], [0, 4], [990, 0])
    ]
    bounded = bounded_totals(counts, 3)
    assert [b.sum() for b in bounded] == [0, 0, 0, 0, 4, 4, 12]
    assert [b.tolist() for b in bounded_totals([np.zeros(2)], 3)] == [[0, 0]]


def test_permuted_predictions_move_towards_the_median():
    """Four perfect matrices: M = I, δ = 1 of the permuted one, to 0.1: M + 0.1 (K − M)."""
    bounded = bounded_confusions([HONEST] * 4 + [PERMUTED], 3.5)
    np.testing.assert_allclose(bounded[4], [[9, 1], [1, 9]])
    for honest in bounded[:4]:
        np.testing.assert_array_equal(honest, HONEST)


def test_mistakes_within_the_limit_are_not_changed():
    """Of label 0, four clients have 2 mistakes in 10 or 0; M[:, 0] = (0.9, 0.1), so each δ is 0.05.
    The limit is 3.5 · 0.05: 3 mistakes, δ = 0.1, are within, 10 mistakes, δ = 0.45, are not."""
    wrong = [np.array([[10.0 - k, 0], [k, 10]]) for k in (0, 0, 2, 2, 1, 3, 10)]
    bounded = bounded_confusions(wrong, 3.5)
    for before, after in zip(wrong[:6], bounded, strict=False):
        np.testing.assert_array_equal(before, after)
    assert bounded[6][1, 0] < 10 and bounded[6].sum() == pytest.approx(20)


def test_other_labels_are_no_mistakes_and_rare_labels_are_not_compared():
    """Clients that have label 0 alone; of label 1 only two have samples, too few for a median."""
    one = np.array([[10.0, 0], [0, 0]])
    counts = [one, one, one, HONEST, PERMUTED * [0, 1]]
    for before, after in zip(counts, bounded_confusions(counts, 3.5), strict=True):
        np.testing.assert_array_equal(before, after)


def test_no_client_takes_counts_from_others():
    """One says 4 and 6, another -99 and 1, without `protect`: 4 and 7 in all."""
    strategy = PriorEM(source_prior="training")
    replies = [update(0, {"labels": np.array(labels)}) for labels in ([4.0, 6.0], [-99.0, 1.0])]
    strategy.exchange = lambda action, payloads, like: replies
    assert strategy._sum("labels", [], {}, (2,)).tolist() == [4, 7]


def test_the_methods_limit_with_protect_and_only_then():
    counts = [HONEST] * 4 + [99 * PERMUTED]
    assert BBSE().bounded(counts) is counts
    last = BBSE(protect=True).bounded(counts)[4]
    np.testing.assert_allclose(last, [[27, 3], [3, 27]])
    labels = [np.array([5.0, 5.0])] * 4 + [np.array([990.0, 0])]
    assert PriorEM(protect=True).bounded(labels)[4].tolist() == [30, 0]


@pytest.mark.parametrize("protect", [False, True])
def test_one_client_counts_as_one_in_autos_sums(protect):
    """A loss is a share, always, of the newcomers that get a correction, and so is a gain;
    confusion counts and histograms are limited with protect."""
    exchanges = auto._Exchanges.__new__(auto._Exchanges)
    exchanges.strategy = auto.Auto(protect=protect)
    shares = {"loss": np.array([-40.0, 9.0, 0.5, 0.5]), "corrected": np.array([0.0, 7, 0.6, 0.4])}
    losses = [shares | {"clients": np.array([3.0]), "gain": np.array([5.0, -7, 0.2, -0.5])}]
    exchanges.bound(losses)
    assert losses[0]["corrected"].tolist() == [0, 1, 0.6, 0.4]
    assert losses[0]["loss"].tolist() == [0, 1, 0.5, 0.4] and losses[0]["clients"].tolist() == [1]
    assert losses[0]["gain"].tolist() == [0, -1, 0.2, -0.4]
    answers = [{"confusion": HONEST} for _ in range(4)] + [{"confusion": 99 * PERMUTED}]
    exchanges.bound(answers)
    expected = [[27, 3], [3, 27]] if protect else 99 * PERMUTED
    np.testing.assert_allclose(answers[4]["confusion"], expected)
    misfits = [{"misfits": np.eye(4)[bin_]} for bin_ in (0, 1, 3, 1, 0)]
    exchanges.bound(misfits)
    assert misfits[2]["misfits"].tolist() == [0, 0, 0, 0 if protect else 1]
    gradients = [{"gradient": np.array([g])} for g in (9.0, 10, 11, 12, 100)]
    exchanges.bound(gradients)
    assert gradients[4]["gradient"] == pytest.approx(14.5 if protect else 100)


def test_sums_are_moved_towards_the_median_answer_together():
    """a has the median 11, distances 2, 1, 0, 1, 89 and the limit 3.5; b has the median 1,
    distances 1, 1, 0, 0, 178 and the same limit. The last answer's share is 3.5 / 178 in both."""
    pairs = [(9, 0), (10, 2), (11, 1), (12, 1), (100, 179)]
    answers = [{"a": np.array([float(a)]), "b": np.array([[float(b)]])} for a, b in pairs]
    bounded = bounded_deviations(answers, 3.5)
    assert all(one is other for one, other in zip(bounded[:4], answers, strict=False))
    assert bounded[4]["a"] == pytest.approx(11 + 89 * 3.5 / 178)
    assert bounded[4]["b"].tolist() == [[pytest.approx(4.5)]]
    assert bounded_deviations(answers[1:], 3.5)[3] is answers[4]  # of four nobody is usual


def test_answers_of_zeros_are_no_measure_of_deviations():
    """Of the answers 1, 2, 3, 4 and 103 the median is 3. Their distances from it are 2, 1, 0, 1 and
    100, whose lower median is 1: 103 becomes 3 + 3.5 · 1."""
    values = (0.0, 1, 0, 2, 0, 3, 0, 4, 0, 103, 0)
    bounded = bounded_deviations([{"sum": np.array([value])} for value in values], 3.5)
    assert [float(b["sum"][0]) for b in bounded] == [0, 1, 0, 2, 0, 3, 0, 4, 0, 6.5, 0]


def test_arrays_in_which_most_clients_agree_have_no_limit():
    """Most clients have no changed prediction; one that has some is honest."""
    answers = [{"count": np.array([c]), "sum": np.ones(1)} for c in (0.0, 0, 0, 0, 7)]
    assert bounded_deviations(answers, 3.5)[4]["count"] == 7


def test_the_histograms_that_reach_furthest_do_not_count():
    histograms = [np.eye(4)[bin_] for bin_ in (0, 1, 3, 1)] + [np.zeros(4)]
    kept = without_highest(histograms)
    assert [h.sum() for h in kept] == [1, 1, 0, 1, 0]
    assert [num_trimmed(n) for n in (5, 10, 49, 120)] == [1, 1, 5, 12]
    assert without_highest(histograms[:4])[2].sum() == 1


def test_false_moments_give_no_negative_variance():
    """One class of two samples whose mean is 3: its squares are at least 18. Of −82 the variance
    would be −100."""
    within = within_classes(np.array([2.0]), np.array([[3.0]]), np.array([-82.0]), Blocks((1,)))
    assert within.tolist() == [0]
    honest = np.array([[2.0, 1], [1, 2]])
    assert semidefinite(honest) is honest
    np.testing.assert_allclose(semidefinite(np.diag([2.0, -1])), np.diag([2.0, 0]), atol=1e-12)


def test_a_false_hessian_points_no_step_anywhere():
    """Minus the penalty, so that the sum of both is singular: the step is the gradient over the
    penalty."""
    exchanges = auto._Exchanges.__new__(auto._Exchanges)
    exchanges.strategy = auto.Auto()
    node = Node(0, 50)
    exchanges.training, exchanges.folds = [node], {node: 0}
    exchanges.num_folds, exchanges.features, exchanges.candidates = 1, 1, ("bbse",)
    reply = update(
        0, {"gradient": np.full((1, 1, 2), 5.0), "hessian": -PENALTY * np.eye(2)[None, None]}
    )
    exchanges.replies = lambda query, sent, shapes: [reply]
    theta = exchanges.fitted(auto.Rule())
    np.testing.assert_allclose(theta[0, 0].ravel(), [0.5, 0.5])
