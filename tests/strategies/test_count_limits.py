"""Limits of counts, by hand."""

import numpy as np
import pytest

from strategies.core.count_limits import bounded_confusions, bounded_totals
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
    nothing = [np.zeros(2), np.zeros(2), np.ones(2)]
    assert bounded_totals(nothing, 3)[2].tolist() == [1, 1]


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


def test_the_methods_limit_with_protect_and_only_then():
    counts = [HONEST] * 4 + [99 * PERMUTED]
    assert BBSE().bounded(counts) is counts
    last = BBSE(protect=True).bounded(counts)[4]
    np.testing.assert_allclose(last, [[27, 3], [3, 27]])
    labels = [np.array([5.0, 5.0])] * 4 + [np.array([990.0, 0])]
    assert PriorEM(protect=True).bounded(labels)[4].tolist() == [30, 0]


@pytest.mark.parametrize("protect", [False, True])
def test_one_client_counts_as_one_in_autos_sums(protect):
    """A loss is a share, always; confusion counts and histograms are limited with protect."""
    exchanges = auto._Exchanges.__new__(auto._Exchanges)
    exchanges.strategy = auto.Auto(protect=protect)
    losses = [{"loss": np.array([-40.0, 9.0, 0.5]), "clients": np.array([3.0])}]
    exchanges.bound(losses)
    assert losses[0]["loss"].tolist() == [0, 1, 0.5] and losses[0]["clients"].tolist() == [1]
    answers = [{"confusion": HONEST} for _ in range(4)] + [{"confusion": 99 * PERMUTED}]
    exchanges.bound(answers)
    expected = [[27, 3], [3, 27]] if protect else 99 * PERMUTED
    np.testing.assert_allclose(answers[4]["confusion"], expected)
