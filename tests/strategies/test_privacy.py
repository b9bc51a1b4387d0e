"""Differential privacy: what clients send, what the server aggregates, what is spent."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from scipy import stats

from clients.core.arrays import from_record, to_record
from clients.core.privacy import SystemGenerator, check_covered, clipped, private
from clients.core.protocol import LOCAL_NOISE
from strategies.core import accountant
from strategies.core.accountant import central_epsilon, local_epsilon
from strategies.core.privacy import Privacy, checked
from strategies.core.replies import Node, Update

CENTRAL = {"dp": "central", "dp_noise_multiplier": 1.0}
METRICS = {"num-examples": 20, "loss": 0.7}
ROLE = {"client": 4, "novel": False, "unlabeled": True, "model": "mlp"}
PROPERTIES = ROLE | {"num-examples": 20, "prototype": 3}


def replied(action, change, asked, dp, client=4, properties=None, given=None, **options):
    """What leaves of the reply of `client`; with `train`, arrays of ones were sent and
    grew by `change`."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
    sent = {name: np.ones_like(a) for name, a in change.items()}
    config = ConfigRecord({"server-round": 3} | asked)
    content = RecordDict({"arrays": to_record(sent), "config": config} | (given or {}))
    message = Message(content, dst_node_id=1, message_type=action)
    message.metadata.__dict__["_message_id"] = "1"
    known = {"dp": dp, "dp-clip": 1.0, "dp-noise-multiplier": 0.0, "dp-covers": "everything"}
    settings = known | {"dp-generator": "seeded", "seed": 0} | options
    context = Context(1, 1, {"partition-id": client}, RecordDict(), settings)

    check_covered(message, settings)
    reply = RecordDict({"metrics": MetricRecord(METRICS)})
    if action == "query":
        reply = RecordDict({"properties": ConfigRecord(PROPERTIES | (properties or {}))})
    elif action != "evaluate":
        grown = change if given else {name: 1 + a for name, a in change.items()}
        reply["arrays"] = to_record(grown)
    return private(Message(reply, reply_to=message), message, context, settings).content


def answered(change, asked=None, dp="central", **options):
    """The change that leaves a client whose training made `change`."""
    reply = replied("train", change, asked or {}, dp, **options)
    return {name: a - 1 for name, a in from_record(reply["arrays"]).items()}


def test_update_is_clipped_over_all_arrays_together():
    """Norms 6 and 8 make 10 = 10 C with C = 1: it leaves as 0.6 and 0.8, of norm 1."""
    change = {"a": np.array([6.0], np.float32), "heads.3.weight": np.array([[0, 8]], np.float32)}
    reply = answered(change)
    assert reply["a"] == pytest.approx([0.6])
    assert reply["heads.3.weight"] == pytest.approx(np.array([[0, 0.8]]))
    assert answered({"a": np.array([0.3, 0.4])})["a"] == pytest.approx([0.3, 0.4])
    assert answered({"a": np.array([30.0])}, dp="none")["a"].tolist() == [30.0]


@pytest.mark.parametrize("dp", ["central", "local"])
def test_counters_leave_no_private_client(dp, monkeypatch):
    """Twenty steps would clip a change of norm 0.5 at C = 1 to a fortieth, and tell their number.
    The counter returns as it was sent, 1. Names and dtypes are kept."""
    monkeypatch.setattr("clients.core.privacy.noised", lambda arrays, *_: arrays)
    change = {"w": np.array([0.3, 0.4]), "n": np.array(20)}
    reply = from_record(replied("train", change, {LOCAL_NOISE: 1.0}, dp)["arrays"])
    assert list(reply) == ["w", "n"] and reply["n"].dtype == np.int64
    assert reply["w"] - 1 == pytest.approx(change["w"]) and reply["n"].tolist() == 1


def test_a_server_that_sends_a_counter_as_a_float_learns_no_count(monkeypatch):
    """The client's array is one of integers, whatever dtype was sent; and the other way round."""
    for sent, grown in ((np.ones(1), np.array([21])), (np.ones(1, int), np.array([1.5]))):
        asked = {"arrays": to_record({"a": sent})}
        reply = replied("train", {"a": grown}, {}, "central", given=asked)
        assert from_record(reply["arrays"])["a"].tolist() == [1]


def test_local_noise_has_the_scale_that_was_asked_for():
    """100 000 entries, σ = 0.5: chi-square limits at 1e-4 on both sides, and it is Gaussian."""
    change = {"a": np.zeros(100_000, np.float32) + np.float32(1e-9)}
    noise = answered(change, {LOCAL_NOISE: 0.5}, "local")["a"]
    square = (noise / 0.5) ** 2
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], len(noise))
    assert low < square.sum() < high
    assert stats.kstest(noise / 0.5, "norm").pvalue > 1e-4


def test_system_generator_is_standard_normal_and_never_repeats():
    draws = SystemGenerator().standard_normal((50_000,))
    assert stats.kstest(SystemGenerator().random(50_000), "uniform").pvalue > 1e-5
    assert stats.kstest(draws, "norm").pvalue > 1e-5
    assert np.isfinite(draws).all()
    assert (draws != SystemGenerator().standard_normal((50_000,))).any()


@pytest.mark.parametrize(("byte", "draw"), [(b"\xff", 8.2095), (b"\x00", -8.2095)])
def test_system_generator_is_finite_at_both_ends(monkeypatch, byte, draw):
    """Φ⁻¹(2⁻⁵³) = −8.2095, the outermost numbers that can be drawn."""
    monkeypatch.setattr("os.urandom", lambda count: byte * count)
    assert SystemGenerator().standard_normal((2,)) == pytest.approx(draw, abs=1e-4)


# On the client


def test_noise_is_that_of_one_client_in_one_round():
    """Noise that two clients shared would cancel out of their difference."""
    one, again, later, other = (
        answered({"a": np.ones(3)}, {LOCAL_NOISE: 0.5, "server-round": n}, "local", client=c)[
            "a"
        ].tolist()
        for c, n in ((4, 1), (4, 1), (4, 2), (5, 1))
    )
    assert one == again
    assert not set(one) & set(later) and not set(one) & set(other)


def test_a_change_of_zeros_and_one_that_is_not_finite_leave_as_zeros():
    """A reply must not reveal that a client diverged; noise is added to these zeros."""
    for values in ([0, 0], [np.nan, 1], [np.inf, 1]):
        assert clipped({"a": np.array(values, np.float32)}, 2.0)["a"].tolist() == [0, 0]
    noise = answered({"a": np.array([np.nan, 1])}, {LOCAL_NOISE: 0.5}, "local")["a"]
    assert (np.isfinite(noise) & (noise != 0)).all()


@pytest.mark.parametrize(
    ("asked", "z"), [({}, 0.0), ({LOCAL_NOISE: 0.0}, 0.0), ({LOCAL_NOISE: 0.9}, 2.0)]
)
def test_a_client_does_not_answer_a_server_that_asks_for_too_little_noise(asked, z):
    """With z = 2 and C = 0.5 the client's configuration says 1."""
    with pytest.raises(ValueError, match=r"asked for noise of .* promised at least .*; give the s"):
        answered({"a": np.ones(1)}, asked, "local", **{"dp-noise-multiplier": z, "dp-clip": 0.5})


def test_a_client_knows_what_noise_its_epsilon_needs():
    """Three rounds at δ = 1e-5 and ε = 2, whose z is sought as the server does: more noise than
    one round alone needs, and a hundredth less is too little."""
    own = {"dp-epsilon": 2.0, "dp-delta": 1e-5, "rounds": 3, "dp-clip": 0.5}
    z = accountant.multiplier(lambda z: local_epsilon(3 * (2 / z) ** 2, 1e-5), 2.0)
    for factor in (1.0, 2.0):
        answered({"a": np.ones(1)}, {LOCAL_NOISE: factor * z * 0.5}, "local", **own)
    for factor in (0.99, 3**-0.5):
        with pytest.raises(
            ValueError, match=r"asked for noise of .* promised at least .*; give the s"
        ):
            answered({"a": np.ones(1)}, {LOCAL_NOISE: factor * z * 0.5}, "local", **own)


def test_metrics_and_properties_that_tell_of_samples_stay():
    none = {"a": np.zeros(2)}
    assert dict(replied("train", none, {}, "central")["metrics"]) == {"num-examples": 1}
    got = dict(replied("query", none, {}, "local")["properties"])
    assert got == ROLE
    why = {"error": "OSError (share.py:9)"}  # reduced before: a client that cannot start
    assert dict(replied("query", none, {}, "local", properties=why)["properties"]) == ROLE | why
    assert dict(replied("query", none, {}, "none")["properties"]) == PROPERTIES


@pytest.mark.parametrize("action", ["evaluate", "query.som", "train.assign"])
def test_what_is_not_covered_is_answered_only_if_it_need_not_be(action):
    none = {"a": np.zeros(2)}
    with pytest.raises(ValueError, match=f"the answer to '{action}' is not covered"):
        replied(action, none, {}, "central")
    got = replied(action, none, {}, "central", **{"dp-covers": "model-updates"})["metrics"]
    assert dict(got) == (METRICS if action == "evaluate" else {"num-examples": 1})
    assert (
        "prototype"
        in replied("query", none, {}, "local", **{"dp-covers": "model-updates"})["properties"]
    )


# On the server


def updates(count, value, size=3):
    return [
        Update(Node(i, 50 + i), {"a": np.full(size, value, np.float32)}, 20 + i, {})
        for i in range(count)
    ]


def central(**options):
    """20 users of 100 expected, where nothing else is said."""
    known = {"fraction_train": 0.2, "num_clients": 200, "dp_generator": "seeded"}
    return Privacy(dp="central", **{"dp_noise_multiplier": 1.0} | known | options)


def summed(privacy, replies, start):
    """The arrays that the private mean makes of `start`."""
    (only,) = privacy.protect(replies, {"a": start}, 1)
    return only.arrays["a"]


def test_central_mean_divides_by_the_users_expected():
    """30 of 100 users came where 20 were expected; Δ = 0.5 in each of three entries, of norm
    0.866 < C; z ≈ 0: mean 30 · 0.5 / 20 = 0.75 over x = 2."""
    start = np.full(3, 2, np.float32)
    moved = summed(central(dp_noise_multiplier=1e-12), updates(30, 2.5), start)
    assert moved == pytest.approx([2.75] * 3, rel=1e-6)


def test_a_client_too_many_that_comes_later_is_named_and_ends_no_run(caplog):
    """100 users are declared; local privacy has no such number."""
    privacy = central(dp_noise_multiplier=1.0)
    privacy.check_users(100, 1)
    with pytest.raises(ValueError, match=r"101 training clients .* by 100 users .* 1\.01 times"):
        privacy.check_users(101, 1)
    assert not caplog.text
    privacy.check_users(101, 2)
    assert "101 training clients are connected" in caplog.text
    Privacy(dp="local", dp_noise_multiplier=1.0, num_clients=2).check_users(3, 1)


def test_the_server_clips_all_arrays_together():
    """Changes 6 and 8 make 10 = 10 C: 0.6 and 0.8, over m = 20."""
    start, moved = {"a": np.ones(1), "b": np.ones(1)}, {"a": np.full(1, 7.0), "b": np.full(1, 9.0)}
    privacy = central(dp_noise_multiplier=1e-12)
    (only,) = privacy.protect([Update(Node(0, 50), moved, 1, {})], start, 1)
    assert only.arrays["a"] - 1 == pytest.approx(0.03)
    assert only.arrays["b"] - 1 == pytest.approx(0.04)


def test_the_server_keeps_its_counters():
    """A stranger's client sends 400 more steps: the server keeps 7, adds no noise to it, and clips
    the change of weights, of norm 0.5, not at all: 0.5 / 20 over 1."""
    start = {"w": np.ones(1), "n": np.array(7), "mask": np.array([True])}
    sent = {"w": np.array([1.5]), "n": np.array(407), "mask": np.array([False])}
    privacy = central(dp_noise_multiplier=1e-12)
    for replies in ([Update(Node(0, 50), sent, 1, {})], []):
        (only,) = privacy.protect(replies, start, 1)
        assert only.arrays["w"] - 1 == pytest.approx(0.025 * len(replies))
        assert only.arrays["n"] == 7 and only.arrays["mask"].tolist() == [True]
        assert [a.dtype for a in only.arrays.values()] == [a.dtype for a in start.values()]
    loud = central(dp_noise_multiplier=1000.0)
    assert loud.protect([], start, 1)[0].arrays["n"] == 7


@pytest.mark.parametrize("count", [0, 10])
def test_central_noise_of_the_mean(count):
    """σ of the mean = z C / (q N) = 2 · 0.5 / 20 = 0.05, at 50 000 entries, also where nobody
    took part."""
    n = 50_000
    privacy = central(dp_noise_multiplier=2.0, dp_clip=0.5)
    moved = summed(privacy, updates(count, 0.0, n), np.zeros(n, np.float32))
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], n)
    assert low < ((moved / 0.05) ** 2).sum() < high


def test_users_are_drawn_one_by_one_and_not_by_the_seed():
    """Counts of 4000 draws at q = 0.2 of 10 users: mean 2, variance 10 q (1 − q) = 1.6, where a
    sample of fixed size has none; sometimes nobody (0.8¹⁰ = 0.107). Limits at five deviations.
    The seed decides them in the test setting alone."""
    nodes = [Node(i, 50 + i) for i in range(10)]
    privacy = central(dp_generator="system")
    counts = np.array([len(privacy.sample(nodes, 1)) for _ in range(4000)])
    assert abs(counts.mean() - 2) < 5 * (1.6 / 4000) ** 0.5
    assert 1.35 < counts.var() < 1.85
    assert abs((counts == 0).mean() - 0.107) < 5 * (0.107 * 0.893 / 4000) ** 0.5
    many = [Node(i, 50 + i) for i in range(200)]
    assert privacy.sample(many, 1) != privacy.sample(many, 1)
    assert central().sample(many, 1) == central().sample(many, 1) != central().sample(many, 2)
    assert central(fraction_train=1.0).sample(nodes, 1) is None


def test_central_privacy_hides_the_participants():
    report = {"round": 3, "sampled": 7, "valid": 6, "dropped": {"error": 1}, "loss": 0.3,
              "seconds": 2.0, "evaluation": {}, "dp-epsilon": 1.0}  # fmt: skip
    assert central().released(report).keys() == {"round", "evaluation", "dp-epsilon"}
    assert Privacy(dp="local", dp_noise_multiplier=1.0).released(report) == report


# What is spent


def test_every_round_that_was_asked_counts():
    """Three central rounds; in two of them nobody may have answered; δ = 1e-5."""
    privacy = central()
    for _ in range(3):
        privacy.spend([])
    assert privacy.report()["dp-epsilon"] == central_epsilon({(1.0, 0.2): 3}, 1e-5)


def test_local_budget_is_that_of_the_user_who_was_asked_most_often():
    """Users 0, 1, 1, 1 and 2 were asked, whether or not they answered: Σ μ² = 3 (2/4)² = 0.75."""
    privacy = Privacy(dp="local", dp_noise_multiplier=4.0, dp_clip=0.5)
    for asked in ([0, 1], [1], [2, 1]):
        privacy.spend([Node(i, 50 + i) for i in asked])
    assert privacy.settings() == {LOCAL_NOISE: 2.0}
    assert privacy.report()["dp-epsilon"] == local_epsilon(0.75, 1e-5)


@pytest.mark.parametrize("mode", ["local", "central"])
def test_noise_multiplier_is_calibrated_to_epsilon(mode, monkeypatch):
    """Over 20 rounds, and over 20 more; losses are discretised coarsely, for speed."""
    monkeypatch.setattr(accountant, "FINE", 1e-2)
    monkeypatch.setattr(accountant, "COARSE", 1e-2)
    options = {"dp_epsilon": 2.0, "fraction_train": 0.1, "rounds": 20}
    privacy = Privacy(dp=mode, **options)
    for _ in range(20):
        privacy.spend([Node(0, 50)])
    assert 1.99 < privacy.report()["dp-epsilon"] <= 2.0
    again = Privacy(dp=mode, spent=privacy.state(), **options | {"dp_epsilon": 2.5})
    for _ in range(20):
        again.spend([Node(0, 50)])
    assert 2.49 < again.report()["dp-epsilon"] <= 2.5
    with pytest.raises(ValueError, match="has spent ε = "):
        Privacy(dp=mode, spent=privacy.state(), **options | {"dp_epsilon": 1.5})


def test_what_was_spent_survives_a_crash_and_is_not_counted_twice():
    got = []
    privacy = Privacy(dp="local", dp_noise_multiplier=4.0)
    privacy.on_spend = got.append
    privacy.spend([Node(3, 53)])
    privacy.spend([Node(3, 53)])
    terms = {"generator": "system", "not-covered": []}
    assert got == [{"mode": "local", "spent": {"3": n * 0.25}} | terms for n in (1, 2)]
    again = Privacy(dp="local", dp_noise_multiplier=4.0, spent=got[0])
    again.restore(got[1])
    again.restore(got[0] | {"spent": {"3": 0.25, "5": 0.5}})  # never less than what was spent
    assert again.state()["spent"] == {"3": 0.5, "5": 0.5}
    with pytest.raises(ValueError, match="trained with dp 'local'"):
        central(spent=got[0])


def test_with_local_noise_all_users_have_the_same_weight():
    """20, 21 and 22 samples count as one each; what came is what is averaged."""
    replies = Privacy(dp="local", dp_noise_multiplier=4.0).protect(updates(3, 1.5), {}, 1)
    assert [(u.num_examples, u.arrays["a"].tolist()) for u in replies] == [(1, [1.5] * 3)] * 3


def test_the_servers_noise_is_another_one_in_every_round():
    one, two, again = (
        central().protect([], {"a": np.zeros(3)}, number)[0].arrays["a"].tolist()
        for number in (1, 2, 1)
    )
    assert one == again and not set(one) & set(two)


def test_terms_name_unit_adversary_and_exclusions():
    privacy = Privacy(dp="local", dp_noise_multiplier=4.0, dp_covers="model-updates")
    privacy.admit("scores of evaluations")
    assert privacy.terms() == (
        "one user's updates replaced, against the server too; sum of Gaussians, the user asked "
        "most often; not covered: scores of evaluations"
    )
    assert "one user added or removed" in central().terms()
    assert "TEST SETTING" in central().terms()
    with pytest.raises(ValueError, match="set dp-covers to 'model-updates'"):
        central().admit("embeddings")


@pytest.mark.parametrize(("delta", "is_said"), [(1e-5, False), (0.09, False), (0.1, True)])
def test_a_delta_that_permits_to_publish_a_user_is_said(delta, is_said):
    """Ten users: from δ = 1/10 on one of them may be published on average."""
    privacy = central(num_clients=10, train_fraction=1.0, dp_delta=delta)
    said = "; δ is not below 1 / 10 users, so it permits to publish one user's data"
    assert (said in privacy.terms()) == is_said


def test_terms_go_on_with_what_was_spent():
    """Of two parts the weaker terms hold: TEST of the first, what either does not cover, and that
    both go on from somewhere. A ledger without terms has the weakest."""
    first = Privacy(dp="local", dp_noise_multiplier=4.0, dp_generator="seeded")
    first.not_covered = ["embeddings"]
    second = Privacy(
        dp="local", dp_noise_multiplier=4.0, dp_covers="model-updates", spent=first.state()
    )
    got = []
    second.on_spend = got.append
    second.admit("scores of evaluations")
    third = Privacy(dp="local", dp_noise_multiplier=4.0, spent=got[-1])
    for privacy in (second, third):
        assert privacy.report()["dp-generator"] == "seeded"
        words = "not covered: embeddings, scores of evaluations; continues a saved run"
        assert words in privacy.terms()
        assert privacy.terms().endswith("TEST SETTING: a person who knows the seed knows the noise")
    again = Privacy(dp="local", dp_noise_multiplier=4.0)
    again.restore({"mode": "local", "spent": {}})
    assert "not covered: scores and exchanges of the saved run; TEST" in again.terms()
    assert "continues a saved run" not in again.terms()


LEDGER = {"mode": "central", "spent": {"1.5 1.0": 3}}
OF_LOCAL = {"mode": "local", "spent": {"3": 0.25}}


@pytest.mark.parametrize(
    ("got", "why"),
    [
        ([LEDGER], "its content is .*; it must be a table"),
        ({"mode": "central"}, "'spent' is None; it must be a table"),
        (LEDGER | {"spent": [3]}, r"'spent' is \[3\]; it must be a table"),
        (LEDGER | {"mode": "none"}, "'mode' is 'none'; it must be 'local' or 'central'"),
        (LEDGER | {"mode": []}, r"'mode' is \[\]"),
        (LEDGER | {"epsilon": 1}, "a key is 'epsilon'; it must be one of mode, spent"),
        (LEDGER | {"generator": "dice"}, "'generator' is 'dice'"),
        (LEDGER | {"generator": ["system"]}, "'generator' is "),
        (LEDGER | {"not-covered": "scores"}, "'not-covered' is 'scores'; it must be a list"),
        *[
            (LEDGER | {"spent": {"1.5 1.0": count}}, "'spent' of '1.5 1.0' is .* a whole number")
            for count in (-3, 0.5, 3.0, True, np.nan, np.inf, "3", None, 10**400)
        ],
        *[
            (LEDGER | {"spent": {key: 3}}, "a key of 'spent' is .* two numbers, z and q")
            for key in ("1.5", "x 1.0", "nan 1.0", "-1.5 1.0", "1.5 1.1", "1.50 1.0", "", "1 1 1")
        ],
        *[
            (OF_LOCAL | {"spent": {"3": loss}}, "'spent' of '3' is .* a finite number from 0")
            for loss in (-0.25, True, np.nan, np.inf, "1", None, [0.25], 10**400)
        ],
        *[
            (OF_LOCAL | {"spent": {key: 1}}, "a key of 'spent' is .* the number of a client")
            for key in ("", "-3", "03", "three", "1.5 1.0", "٣")
        ],
    ],
)
def test_a_ledger_that_no_run_wrote_is_refused_by_name(got, why):
    with pytest.raises(ValueError, match=r"^lab/privacy\.json is refused: " + why):
        checked(got, "lab/privacy.json")


def test_every_runs_ledger_is_taken():
    one, two = central(), Privacy(dp="local", dp_noise_multiplier=4.0, dp_covers="model-updates")
    for privacy in (one, two):
        privacy.spend([Node(0, 50), Node(2**64 - 1, 51)])
        assert checked(json.loads(json.dumps(privacy.state())), "it") == privacy.state()
    two.admit("scores")
    assert checked(two.state(), "it") == two.state()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dp": "some"}, "unknown dp 'some'"),
        ({"dp": "local"}, "exactly one must be positive"),
        ({"dp": "local", "dp_epsilon": 1.0, "dp_noise_multiplier": 1.0}, "exactly one must"),
        ({"dp": "central", "dp_epsilon": 1.0, "dp_clip": 0.0}, "dp-clip is 0.0"),
        ({"dp_generator": "dice"}, "unknown dp-generator 'dice'"),
        ({"dp_covers": "nothing"}, "unknown dp-covers 'nothing'"),
        ({"dp_epsilon": 1.0}, "dp-epsilon is 1, but dp is 'none'"),
        ({"dp_noise_multiplier": 1.0}, "dp-noise-multiplier is 1 and"),
        (
            {"dp": "local", "dp_noise_multiplier": 1.0, "report_generalization_bound": True},
            "report-generalization-bound asks clients",
        ),
        (CENTRAL | {"min_valid_replies": 2}, "leave min-valid-replies at its default"),
        (CENTRAL | {"robust": "median"}, "leave robust at its default"),
        (CENTRAL | {"max_update_norm": 9.0}, "leave max-update-norm at its default"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        Privacy(**settings)
