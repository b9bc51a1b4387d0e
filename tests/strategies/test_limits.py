"""How much one reply can count: norms by group, sample counts, risks and losses."""

import math

import numpy as np
import pytest
from small_runs import update

from strategies.core.limits import (
    Change,
    NormHistory,
    bound_numbers,
    bounded_weights,
    group_norms,
    lower_quantile,
    scaled,
    usual_count,
)
from strategies.core.replies import Node
from strategies.methods.fedavg import FedAvg


def arrays(**values):
    """Arrays by name, "/" for two underscores and "." for one."""
    names = {name: name.replace("__", "/").replace("_", ".") for name in values}
    return {names[name]: np.array(value, np.float32) for name, value in values.items()}


def of_norm(*norms, n=1):
    """Changes of these norms from zero, by clients 0, 1, …"""
    return [Change(update(i, arrays(w=[x]), n), {}) for i, x in enumerate(norms)]


def usual_of(sizes, *norms, kind="train"):
    """The usual norm of these clients' norms."""
    return sizes.usual(kind, {i: {"": norm} for i, norm in enumerate(norms)})[""]


def test_quantiles_are_members():
    assert lower_quantile([9, 1, 5, 7]) == 5
    assert lower_quantile([9, 1], 0.75) == 1
    assert lower_quantile(range(10), 0.75) == 6


def test_norms_by_hand():
    """(4 − 1, 6 − 2): 5. A statistic and a group count apart, and so does a network that is named
    as a part. A counter 12 and a mask count nowhere."""
    y = arrays(w=[4, 6], control__w=[3], bn_running__mean=[2], base_w=[7])
    y |= {"n": np.array(12), "mask": np.ones(9, bool), "bn.running_mean": y.pop("bn.running/mean")}
    expected = {"": math.hypot(5, 7), "control": 3.0, "running_mean": 2.0}
    assert group_norms(y, arrays(w=[1, 2])) == pytest.approx(expected)
    apart = {"": 5.0, "base.": 7.0, "control": 3.0, "running_mean": 2.0}
    assert group_norms(y, arrays(w=[1, 2]), ("base.",)) == apart
    assert group_norms({"w": np.full(2, 3e38, np.float32)}, {}) == {"": np.inf}
    assert group_norms({"n": np.array([2**62, 2**62])}, {}) == {}
    assert group_norms({"w": np.ones(4, np.float16)}, {"w": np.ones(3, np.float16)}) == {"": 2.0}


def test_scaling_by_hand():
    """From 1 to 5 by a quarter: 2; from nothing to 8: 2; a counter stays at 10."""
    y = {"w": np.array([5], np.float32), "d": np.array([8.0]), "n": np.array(10)}
    start = {"w": np.array([1], np.float32), "d": np.zeros(3)}
    near = scaled(y, start, {"": 0.25, "n": 0.2})
    assert {name: a.tolist() for name, a in near.items()} == {"w": [2.0], "d": [2.0], "n": 10}
    assert [a.dtype for a in near.values()] == [a.dtype for a in y.values()]
    assert scaled(y, start, {"n": 0.2})["w"] is y["w"]


def test_three_liars_of_ten_do_not_move_the_usual_norm():
    """Of 1, …, 7 and three of 1e9 it is 7. Of 1, 2, 3, 4 and three liars, whose lie the upper
    quartile is, it is 4 times the median 4."""
    assert usual_of(NormHistory(), 1e9, *range(1, 8), 1e9, 1e9) == 7
    assert usual_of(NormHistory(), 1e9, *range(1, 5), 1e9, 1e9) == 16


def test_a_usual_norm_is_that_of_several_clients():
    """Of 2, 1e30 and 3 it is 3. Client 1 alone, however often it comes, has one vote of three. A
    cohort that has grown is its own measure, at once; of two the former ones decide."""
    sizes = NormHistory()
    assert usual_of(sizes, 2.0, 1e30, 3.0) == 3.0
    for _ in range(9):
        assert sizes.usual("train", {1: {"": 1e12}}) == {"": 3.0}
    assert sizes.state() == {"train ": {0: 2.0, 2: 3.0, 1: 1e12}}
    again = NormHistory()
    again.load_state(sizes.state())
    assert again.usual("train", {1: {"": 9.0}}) == {"": 3.0}
    assert usual_of(sizes, 70.0, 80.0) == 70.0  # of 3, 70, 80
    assert usual_of(sizes, 700.0, 800.0, 900.0) == 800.0
    assert usual_of(sizes, 1.0, kind="query.encode") == 1.0


def test_of_many_clients_the_last_are_remembered():
    sizes = NormHistory()
    sizes.usual("train", {i: {"": 1.0} for i in range(300)})
    assert list(sizes.state()["train "]) == list(range(100, 300))


def test_a_cohort_that_has_grown_is_not_measured_by_former_ones():
    """900 clients were at 1. Three that are at 70, 80 and 90 now have the usual norm 80."""
    sizes = NormHistory()
    sizes.usual("train", {i: {"": 1.0} for i in range(9, 300)})
    assert usual_of(sizes, 70.0, 80.0, 90.0) == 80.0


def test_a_thousand_times_the_usual_norm_is_absurd():
    """Of a usual norm of 3 that is 3000, of one below 1 it is 1000; infinity always is."""
    near, far, infinite = of_norm(3000.0, 3001.0, np.inf)
    assert [c.absurd({"": 3.0}) for c in (near, far)] == ["", "3e+03 from what was sent, > 3e+03"]
    assert [bool(c.absurd({"": 1e-9})) for c in of_norm(1000.0, 1001.0)] == [False, True]
    assert infinite.absurd({"": 1e30})
    assert "(control)" in Change(update(0, arrays(control__w=[9999])), {}).absurd({"control": 1.0})


def test_an_answer_of_zeros_is_no_measure_of_another():
    """Two of three clients have nothing to add to a sum. The third is honest. In training two that
    did not change say what is usual, and a thousand is the limit."""
    limited = FedAvg().receiver.limited
    assert len(limited("query.sums", of_norm(0, 0, 2000))) == 3
    assert len(limited("train", of_norm(0, 0, 2000))) == 2
    assert len(FedAvg().receiver.limited("query.sums", of_norm(1, 1, 0, 2000))) == 3


def test_a_change_is_finite_if_its_entries_are_though_its_norm_may_not_be():
    """1e30 squared overflows in float32. ∞ − ∞ is no number, whatever was sent; 2⁶² is counted."""
    sent = arrays(v=[0, np.inf], w=[1])
    for v, name in (([1e30, 0], ""), ([np.nan, 0], "v"), ([0, np.inf], "v"), ([0, -np.inf], "v")):
        change = Change(update(0, arrays(w=[2], v=v) | {"n": np.array(2**62)}), sent)
        assert change.not_finite() == name
    assert Change(update(0, arrays(v=[3])), {}).not_finite() == ""


def test_a_change_is_at_most_a_few_usual_norms_long():
    """At 5 usual norms of 2, the change from 1 to 41 ends at 11; one of 10 stays as it is."""
    far, near = (Change(update(0, arrays(w=[w])), arrays(w=[1])) for w in (41, 11))
    assert far.limited({"": 2.0}, 5.0, 0.0, math.inf).arrays["w"].tolist() == [11.0]
    assert near.limited({"": 2.0}, 5.0, 0.0, math.inf).arrays is near.update.arrays
    assert far.limited({"": 2.0}, 0.0, 0.0, math.inf) is far.update
    assert far.limited({"": 0.0}, 5.0, 0.0, math.inf) is far.update  # no measure


def test_each_group_has_its_own_limit_and_all_together_the_norm():
    """Of 30 and 8 with the usual norms 2 and 4, at 5 of them: 10 and 8. Together they are √164
    long; at a norm of ½√164, 5 and 4."""
    change = Change(update(0, arrays(delta__w=[30], control__w=[8])), {})
    usual = {"delta": 2.0, "control": 4.0}
    limited = change.limited(usual, 5.0, 0.0, math.inf)
    assert limited.arrays["delta/w"].tolist() == [10.0]
    assert limited.arrays["control/w"] is change.update.arrays["control/w"]
    shorter = change.limited(usual, 5.0, 164**0.5 / 2, math.inf).arrays
    assert [a.tolist() for a in shorter.values()] == [[pytest.approx(5)], [pytest.approx(4)]]


@pytest.mark.parametrize(
    ("norm", "n", "counted"), [(1, 99, 60), (1, 59, 59), (4, 99, 30), (99, 99, 12), (0.5, 60, 60)]
)
def test_a_long_change_counts_with_fewer_samples(norm, n, counted):
    """At most 60 samples with the usual norm of 2, 30 with twice that, 12 with five times that."""
    (change,) = of_norm(norm, n=n)
    assert change.limited({"": 2.0}, 5.0, 0.0, 60).num_examples == counted


def test_weights_of_long_changes_shrink():
    """With a usual norm of 2, changes of 1, 6 and 99 have ρ = 1, 3 and 5. At ratio 2, the weights
    of the last two are 2/3 and 2/5 of what they were."""
    limited = [c.limited({"": 2.0}, 5.0, 0.0, math.inf) for c in of_norm(1, 6, 99)]
    assert [u.rho for u in limited] == [1, 3, 5]
    assert bounded_weights([0.3, 0.6, 1.0], limited, 2) == pytest.approx([0.3, 0.4, 0.4])
    assert bounded_weights([0.3, 0.6, 1.0], limited, 0) == [0.3, 0.6, 1.0]
    few = of_norm(99)[0].limited({"": 2.0}, 5.0, 0.0, math.inf, norms_limit_counts=False)
    assert few.rho == 1


def test_without_a_limit_of_norms_none_of_counts_follows_from_them():
    (change,) = of_norm(99, n=99)
    assert change.limited({"": 2.0}, 0.0, 0.0, 60).num_examples == 60


def test_the_usual_count_is_a_median_of_those_on_joining():
    """Of 8, 2 and 3 on joining it is 3; without them that of the replies, and at least 1."""
    nodes = [Node(i, 50 + i, properties={"num-examples": n}) for i, n in enumerate((8, 2, 3))]
    replies = [update(0, {}, 900), update(1, {}, 7)]
    assert usual_count(replies, [*nodes, Node(9, 9)]) == 3
    assert usual_count(replies, []) == 7
    assert usual_count([update(0, {}, 0)], []) == 1


def test_risks_and_losses_stay_in_the_cohorts_range():
    """Of 1, 2, 3, 4 and 1e6 the upper quartile is 4: a risk is at most 8, a loss at most 400."""
    values = [1.0, 2.0, 3.0, 4.0, 1e6]
    updates = [update(i, {}, risk=-v, loss=v, accuracy=1.0) for i, v in enumerate(values)]
    limited = bound_numbers(updates)
    assert limited[4].metrics == {"risk": -8.0, "loss": 400.0, "accuracy": 1.0}
    assert all(one is other for one, other in zip(limited[:4], updates[:4], strict=True))
    assert bound_numbers([update(0, {}), update(1, {}, loss=3.0)])[1].metrics == {"loss": 3.0}


def test_a_count_that_no_training_gives_is_refused_and_one_that_was_sent_is_not():
    """2⁵³ + 1 is no exact number in a mean. The server's own large numbers may come back."""
    large = {"w": np.ones(1, np.float32), "n": np.array([2**53 + 1, -3])}
    usual = {"": 1.0}
    assert "n holds 9007199254740993" in Change(update(0, large), {}).absurd(usual)
    assert not Change(update(0, large), large).absurd(usual)
    low = large | {"n": np.array([-(2**63)])}
    assert "n holds 9223372036854775808" in Change(update(0, low), large).absurd(usual)
    assert not Change(update(0, large | {"n": np.array([2**53])}), {}).absurd(usual)


def test_a_client_that_trained_more_often_is_as_long_as_its_change():
    """Twenty times the steps of the others at the same change of weights: nothing is limited."""
    start = {"w": np.zeros(2), "bn.num_batches_tracked": np.array(0)}
    steps = [20, 20, 20, 20, 20, 400]
    changes = [
        Change(update(i, {"w": np.ones(2), "bn.num_batches_tracked": np.array(n)}, 9), start)
        for i, n in enumerate(steps)
    ]
    usual = NormHistory().usual("train", {i: change.norms for i, change in enumerate(changes)})
    for change in changes:
        limited = change.limited(usual, 3.5, 1.5, math.inf)
        assert limited is change.update
