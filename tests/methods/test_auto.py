"""Auto: its client and its server, in small runs and with rules made by hand."""

import json
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from auto_clients import X, Y, network, rule_that_chooses, source_of, training_client
from clients_with_sources import novel_client
from flwr.app import Context, RecordDict
from small_runs import ALL_SAMPLES, SMALL, Watched, fedapps, federate, share, update
from torch import nn
from torch.nn import functional as F

import partitions
from clients.core.client import Client
from clients.core.decision.changes import EVERY
from clients.core.decision.choice import KEEP, LABEL_SHIFT, NEVER, OUTSIDE, Case, Decision, Rule
from clients.core.decision.explanation import KEPT, explained
from clients.core.decision.fit import Statistics
from clients.core.decision.inner_values import look
from clients.core.decision.moments import Blocks, class_means
from clients.core.decision.tallies import derivatives
from clients.core.evaluation import predict_novel
from clients.core.label_shift import log_q_by_em
from clients.methods import _batchwise
from clients.methods._batchwise import pooled_moments
from clients.methods.auto import AutoClient
from clients.methods.bbse import BBSEClient
from clients.methods.bn_adapt import BNAdaptClient
from clients.models import build_model
from clients.models.foreign import adopted
from clients.models.head import headed
from fedapps import InProcessGrid, client_app, load, server_app
from fedapps.callbacks import Callback
from fedapps.common.external_code import allow
from partitions.datasets.loading import Info
from partitions.parts import Part, packed
from partitions.shares import UNLABELED
from strategies.core.replies import Node
from strategies.core.round_state import Stop
from strategies.maths.decision import newton_step
from strategies.maths.label_shift import prior
from strategies.methods import auto as auto_server
from strategies.methods.auto import Auto, Unanswered, _Exchanges

NORMED = ALL_SAMPLES | {"method": "auto", "model": "convnet-bn", "auto.plays": 5}
KINDS = ("query.moments", "query.spread", "query.misfit", "query.play", "query.guard")


def served(client, source, rule):
    """A novel client of the same network with these statistics and this rule, and other inputs."""
    novel = replace(share(X[:25].square(), [0] * 25), novel=True)
    other = AutoClient(network_of(client), novel, candidates=client.candidates)
    arrays = dict(client.initial)
    arrays |= {f"source/{name}": a for name, a in source.items()}
    arrays |= {f"rule/{name}": a for name, a in rule.arrays().items()}
    other.receive(arrays, {})
    return other, X[:25].square()


def network_of(client):
    return build_model("convnet-bn" if client.has_statistics else "convnet", (1, 8, 8), 3, 0)


@pytest.mark.parametrize(
    ("place", "name"),
    [(-1, "none"), (0, "bbse"), (1, "mean-matching"), (2, "bn0"), (3, "bn16")],
)
def test_each_choice_is_its_correction(place, name):
    """The logits are those of the view that is chosen, also in the served network; n, d, w and the
    choice are reported."""
    client = training_client(candidates="bbse,mean-matching,bn0,bn16")
    source = source_of(client)
    # A source in which class 2 is always taken for class 0: BBSE then changes predictions.
    source["confusion"] = np.array([[0.8, 0, 0.9], [0.1, 0.9, 0], [0.1, 0.1, 0.1]], np.float32)
    source["prior"] = np.array([0.1, 0.2, 0.7], np.float32)
    other, x = served(client, source, rule_that_chooses(client, place))
    case, views = other.case(x)
    assert (case.changed[:1] > 0.1).all()
    z = other.predict(x)
    expected = views["" if place < 0 else name]
    if place > 0 and not case.changed[place]:  # nothing changes, so nothing is won
        expected = views[""]
    torch.testing.assert_close(z, expected)
    torch.testing.assert_close(other.personal_model(x)(x), z, rtol=1e-4, atol=1e-5)
    base = Client.predict(other, x)
    torch.testing.assert_close(other.intermediate_logits["base"], base)
    metrics = other.adaptation_metrics
    assert other.choice.name == ("none" if metrics["chosen-none"] else name)
    if place == 0:
        gain = 100 * 0.9 * case.changed[0]
        assert f"{gain:.1f} points are expected to be won" in other.choice.reason
        assert metrics["chosen-bbse"] == 1 and metrics["chosen-none"] == 0
        assert metrics["win-rate"] == pytest.approx(0.9)
        assert metrics["expected-gain"] == pytest.approx(gain / 100)
        assert metrics["changed"] == case.changed[0]
        assert not torch.equal(z.argmax(1), base.argmax(1))
    if place < 0:
        assert metrics["chosen-none"] == 1 and metrics["expected-gain"] == 0
    # No newcomer had fewer than 20 inputs, so nothing is known of a client with 19.
    torch.testing.assert_close(other.predict(x[:19]), Client.predict(other, x[:19]))
    assert other.adaptation_metrics == {
        "chosen-none": 1, "chosen-bbse": 0, "chosen-mean-matching": 0, "chosen-bn0": 0,
        "chosen-bn16": 0,
    }  # fmt: skip
    assert other.choice == ("none", f"{KEPT}: 19 inputs are fewer than the 20 that a choice needs")


def test_a_last_batch_that_is_too_small_for_a_choice_keeps_the_model():
    """25 inputs in batches of 20: the five have FedAvg's logits, and are one of two batches."""
    client = training_client(candidates="bbse")
    other, x = served(client, source_of(client), rule_that_chooses(client, 0))
    other.novel_batch = 20
    z = predict_novel(other, x)
    base = Client.predict(other, x)
    torch.testing.assert_close(z[20:], base[20:])
    torch.testing.assert_close(other.intermediate_logits["base"], base)
    metrics = other.adaptation_metrics
    assert metrics["chosen-none"] + metrics["chosen-bbse"] == 1
    assert metrics["chosen-none"] >= 0.5


def test_a_stream_collects_inputs_until_a_choice_is_certain_and_may_change_its_mind():
    """BBSE changes the shares d = 1, 1 and 0.5 of 30, 30 and 20 inputs, with w = 0.9: w √(n d) is
    4.93, 4.93 and 2.85. The guard of 4 lets the first two pass. Of 12 inputs there is no choice."""
    client = training_client(candidates="bbse")
    rule = replace(rule_that_chooses(client, 0), guard=np.array([4.0, 4.0]))
    other, x = served(client, source_of(client), rule)
    other.stream_inputs = 20
    x = X.square()
    decided = []
    shares = iter([1.0, 1.0, 0.5])

    def case(inputs, y=None):
        """The real views, with hand-made numbers of changed samples."""
        decided.append(inputs)
        case, views = AutoClient.case(other, inputs)
        rows = np.zeros((round(next(shares) * len(inputs)), 10))
        return replace(case, evidence=[rows]), views

    other.case = case
    torch.testing.assert_close(other.update(x[:12]), Client.predict(other, x[:12]))
    assert not decided and other.choice.name == "none" and len(other.stream["inputs"]) == 12
    z = other.update(x[12:30])
    torch.testing.assert_close(decided[0], x[:30])
    _, views = AutoClient.case(other, x[:30])
    torch.testing.assert_close(z, views["bbse"][12:])
    torch.testing.assert_close(other.intermediate_logits["base"], views[""][12:])
    assert other.choice.name == "bbse" and other.choice.reason.startswith("Chose bbse: ")
    assert torch.equal(other.stream["inputs"], x[10:30])
    other.update(x[30:])
    assert torch.equal(decided[1], x[10:])
    assert other.choice.reason.startswith("Chose bbse: ")
    z = other.update(x[:0])
    assert torch.equal(decided[2], x[20:]) and len(z) == 0
    assert other.choice.name == "none"
    assert other.choice.reason.startswith(f"Changed from bbse to none. {KEPT}: ")
    assert other.choice.reason.endswith("the 45.0 points that bbse is expected to win are too "
                                        "uncertain")  # fmt: skip
    other.predict(x[:12])  # evaluation begins anew
    assert torch.equal(other.stream["inputs"], x[:12])


def test_the_reason_says_what_the_inputs_look_like_and_what_is_expected():
    """T 5.2 over 3: outside, where BBSE's 12 points do not count. T 1.2: of 25 inputs 0.25 are
    expected to be won, less than half of one; with 100 inputs 1, which is too uncertain."""
    client = training_client(candidates="bbse,bn16")
    rule = replace(
        rule_that_chooses(client, -1), misfit_limit=np.array(3.0), guard=np.array([9.0, 9.0])
    )
    client.rule = rule.arrays()
    changed = np.array([0.2, 0.1])

    def reason(n, misfit, regime, *win_rates):
        decision = Decision(KEEP, misfit, regime, changed, np.array(win_rates))
        choice = explained(Rule.of(client.rule), decision, client.names, n)
        assert choice.name == "none"
        return choice.reason

    assert reason(100, 5.2, OUTSIDE, 0.6, 0.0) == (
        "Kept the global model: inputs look unlike training (T 5.2 over 3.0) and no correction is "
        "expected to help"
    )
    assert "(T 3.040 over 3.000)" in reason(100, 3.04, OUTSIDE, 0.6, 0.0)  # not 3.0 over 3.0
    inside = "up to the proportions of the classes (T 1.2, at most 3.0)"
    assert reason(25, 1.2, LABEL_SHIFT, 0.05, 0).endswith(
        f"{inside} and no correction is expected to help"
    )
    assert reason(100, 1.2, LABEL_SHIFT, 0.05, 0).endswith(
        f"{inside} and the 1.0 points that bbse is expected to win are too uncertain"
    )
    client.rule["guard"] = np.array([NEVER, 9.0])
    assert reason(100, 1.2, LABEL_SHIFT, 0.05, 0).endswith(
        "the newcomers that clients have played allow no correction"
    )


def test_the_views_are_those_of_the_methods_alone():
    """BN with 16 and 0 prior samples as BN-adapt has it; BBSE as BBSE with the training prior; EM
    on top as prior-EM; all on one batch."""
    client = training_client()
    source = source_of(client)
    other, x = served(client, source, rule_that_chooses(client, -1))
    _, views = other.case(x)
    for name, weight in (("bn0", 0.0), ("bn16", 16.0), ("bn64", 64.0)):
        adapt = novel_client(BNAdaptClient, network(), x, test_batch_size=0, prior_samples=weight)
        torch.testing.assert_close(views[name], adapt.predict(x))
    known = {"confusion": source["confusion"], "prior": source["prior"]}
    alone = novel_client(
        BBSEClient, network(), x, known, test_batch_size=0, source_prior="training"
    )
    torch.testing.assert_close(views["bbse"], alone.predict(x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moments_pooled_over_parts_are_those_of_all_values(layout, monkeypatch):
    """1, 3 and 8: mean 4, variance (9 + 1 + 16)/2 = 13. With values far from 0, and a last
    part that is smaller, as in float64."""
    monkeypatch.setattr(_batchwise, "VALUES_AT_ONCE", 2)
    mean, variance = pooled_moments(torch.tensor([[1.0, 3.0, 8.0]]))
    assert (mean.item(), variance.item()) == (4, 13)
    monkeypatch.setattr(_batchwise, "VALUES_AT_ONCE", 1000)
    draws = torch.Generator().manual_seed(0)
    x = 50 + torch.randn(30, 3, 8, 8, generator=draws).contiguous(memory_format=layout)
    mean, variance = pooled_moments(x.transpose(0, 1).flatten(1))
    exact_variance, exact_mean = torch.var_mean(x.double(), (0, 2, 3))
    torch.testing.assert_close(mean, exact_mean.float())
    torch.testing.assert_close(variance, exact_variance.float(), rtol=1e-5, atol=0)


def test_em_of_several_networks_is_that_of_each():
    log_p = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    log_prior = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    together = log_q_by_em(log_p, log_prior, 5)
    for place in range(3):
        torch.testing.assert_close(together[place], log_q_by_em(log_p[place], log_prior, 5))


def test_large_inputs_in_several_passes_give_the_same():
    client = training_client()
    source, rule = source_of(client), rule_that_chooses(client, -1)
    one, x = served(client, source, rule)
    parts, _ = served(client, source, rule)
    parts.pass_megabytes = 0.002
    assert len(parts.parts(x)) > 1
    (whole, views), (split, other_views) = one.case(x), parts.case(x)
    np.testing.assert_allclose(whole.misfits, split.misfits, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(views["bbse"], other_views["bbse"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["convnet-bn", "convnet", "mlp"])
def test_inner_values_are_channel_means_the_softmax_and_the_last(name):
    """Of a network with batch normalisation the inputs of its layers; else what the client's inputs
    look like, and the inputs of the head."""
    client = training_client(name)
    phi, z = client.inner_values(X)
    blocks = client.blocks.split(phi)
    torch.testing.assert_close(z, client.model.eval()(X))
    p = z.softmax(1).detach().double().numpy()
    np.testing.assert_allclose(blocks[-2], p, atol=1e-6)
    top = np.sort(p, axis=1)
    z = z.detach().double().numpy()
    last = [-(p * np.log(p)).sum(1), top[:, 2] - top[:, 1], np.log(np.exp(z).sum(1)), z.max(1)]
    np.testing.assert_allclose(blocks[-1], np.stack(last, 1), atol=1e-5)
    with torch.no_grad():
        if name == "convnet-bn":
            first = client.model.conv1(X).mean((2, 3))
        else:
            first = client.model.features(X)
    place = 0
    if name != "convnet-bn":
        place = 1
        np.testing.assert_array_equal(blocks[0], look(X).numpy())
    np.testing.assert_allclose(blocks[place], first.numpy(), atol=1e-5)
    assert len(blocks) == 4


def test_a_rule_of_other_inner_values_is_refused():
    """That of an earlier release, whose plain networks had three blocks."""
    client = training_client("convnet")
    source = source_of(client)
    source["means"] = source["means"][:, 4:]
    with pytest.raises(ValueError, match=r"519 inner values, .* reads 523.*make the rule anew"):
        served(client, source, rule_that_chooses(client, -1))[0].predict(X)


def test_the_exchanges_come_once_at_the_end_and_no_novel_client_answers(monkeypatch):
    lines = []
    monkeypatch.setattr(auto_server, "log", lambda _, text, *words: lines.append(text % words))
    result, grid = federate(Watched, **NORMED, **{"evaluate-every": 1})
    sent = [m for m in grid.seen if not m.metadata.reply_to_message_id]
    training = {m.metadata.dst_node_id for m in sent if m.metadata.message_type == "train"}
    seen = []
    for message in sent:
        if message.metadata.message_type in KINDS:
            assert message.content["config"]["server-round"] == 2
            assert message.metadata.dst_node_id in training
            seen.append(message.metadata.message_type)
    clients = len(training)
    counts = [seen.count(kind) for kind in KINDS]
    assert counts == [clients, clients, 2 * clients, 10 * clients, clients]
    of_exchanges = [line for line in lines if "exchange" in line]
    assert len(of_exchanges) == 15
    assert of_exchanges[0] == "auto: query.moments, exchange 1 of 15"
    assert of_exchanges[-1] == "auto: query.guard, exchange 15 of 15"
    first, last = (dict(result.evaluate_metrics_clientapp[r]) for r in (1, 2))
    assert "novel-misfit" not in first and "novel-misfit" in last
    shares = [last[f"novel-chosen-{name}"] for name in ("none", "mean-matching", "bn16")]
    assert sum(shares) == pytest.approx(1)


def test_the_exchanges_are_no_cost_of_a_novel_client(tmp_path):
    """It gets the model, statistics and rule, and sends nothing."""
    federate(**NORMED | {"rounds": 2, "output-dir": str(tmp_path)})
    before, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "rule" not in before["phases"] and before["novel-megabytes"]["up"] == 0
    assert last["novel-megabytes"]["up"] == 0
    model = before["novel-megabytes"]["down"]
    exchanged = last["rule-megabytes"]
    assert model < last["novel-megabytes"]["down"] < exchanged["down"] / 2
    assert exchanged["up"] > 0
    phases = dict(last["phases"])
    assert phases.pop("rule") > phases.pop("novel-client") > 0
    assert sum(last["phases"].values()) - last["phases"]["novel-client"] <= last["seconds"]


def test_without_newcomers_nobody_is_asked_and_clients_are_fedavgs():
    nothing = {"auto.plays": 0, "auto.held-out": 0.0}
    result, grid = federate(Watched, **NORMED | nothing)
    assert not [m for m in grid.seen if m.metadata.message_type in KINDS]
    alike, _ = federate(**NORMED | {"method": "fedavg"})
    metrics = dict(result.evaluate_metrics_clientapp[2])
    expected = dict(alike.evaluate_metrics_clientapp[2])
    assert {name: metrics[name] for name in expected} == expected


def test_no_choice_depends_on_a_novel_label():
    """The labels of novel clients are shuffled: logits, choices and descriptors stay the same; only
    scores change."""
    config = {**NORMED, "data-seed": 3, "partition": "iid"}
    federation = partitions.federation(SMALL | config)
    labels = federation.dataset.y
    kept = labels.clone()
    before = dict(federate(**config)[0].evaluate_metrics_clientapp[2])
    for client in np.flatnonzero(federation.novel):
        index = federation.share(int(client)).everything.index
        labels[index] = kept[index.flip(0)]
    try:
        after = dict(federate(**config)[0].evaluate_metrics_clientapp[2])
    finally:
        labels.copy_(kept)
    changed = {name for name in before if before[name] != after[name]}
    assert "novel-misfit" in before and "novel-accuracy" in changed
    assert all(name.startswith("novel-") and ("accuracy" in name or name.endswith(("loss", "sem")))
               for name in changed)  # fmt: skip


class Frozen(nn.Module):
    """Normalises by constants, as torchvision's frozen batch normalisation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.full((4, 1, 1), 0.1))

    def forward(self, x):
        return x - self.running_mean


@pytest.mark.parametrize(
    "norm",
    [
        nn.GroupNorm(2, 4),
        nn.LayerNorm([4, 8, 8]),
        nn.InstanceNorm2d(4),
        nn.BatchNorm2d(4, track_running_stats=False),
        Frozen(),
    ],
    ids=str,
)
def test_other_normalisation_has_no_statistics_to_correct(norm):
    """Group, layer and instance normalisation, and batch normalisation without statistics: BBSE
    alone, by the inner values of a network without such layers; client and server agree on their
    sizes."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)]
    model = headed(nn.Sequential(*layers), "auto", (1, 8, 8), 3)
    client = AutoClient(model, share(X, Y), held_out=0.75)
    assert client.names == ("mean-matching",) and client.blocks.sizes == (4, 256, 3, 4)
    source = source_of(client)
    client.receive(client.initial | {f"source/{name}": a for name, a in source.items()}, {})
    case, views = client.case(X)
    assert [*views] == ["", "bbse", "mean-matching", "em"] and case.misfits.shape == (4,)
    assert np.isfinite(case.misfits).all() and np.isfinite(case.descriptors).all()


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (nn.GroupNorm(2, 4), "normalisation, which my-network lacks"),
        (
            nn.BatchNorm2d(4, track_running_stats=False),
            "normalisation with running statistics, and that of my-network keeps none: 1; leave "
            "out track_running_stats=False",
        ),
        (
            Frozen(),
            "normalisation of torch.nn; my-network has running statistics in Frozen alone",
        ),
    ],
)
def test_the_runs_line_says_why_a_candidate_is_left_out(norm, words):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), norm)
    network.head = nn.Linear(4, 3)
    settings = {"model": "my-network", "candidates": "bbse,bn16", "plays": 5, "shape": (1, 8, 8)}
    expected = f"candidates none, bbse; bn16 needs batch {words}"
    assert AutoClient.caveats(network, **settings) == [expected]


def test_answers_are_dropped_before_the_next_ones_come():
    """Those of wide networks are larger than the models of all rounds."""
    client = training_client()
    exchanges = _Exchanges(Auto(alpha=0.5), client.initial, [Node(0, 50)])
    held = []

    def exchange(action, payloads, like):
        if action == "query.spread":
            assert held[0]() is None
        answer = {"query.moments": client.moments, "query.spread": client.spread}[action]
        arrays, _ = answer(next(iter(payloads.values())), {})
        held.append(weakref.ref(arrays["squares"]))
        return [update(0, arrays)]

    exchanges.strategy.exchange = exchange
    exchanges.statistics()
    assert len(held) == 2


def test_a_network_without_statistics_corrects_proportions_alone():
    result, _ = federate(**NORMED | {"model": "mlp", "rounds": 1})
    metrics = dict(result.evaluate_metrics_clientapp[1])
    chosen = {name for name in metrics if "novel-chosen" in name}
    assert chosen == {"novel-chosen-none", "novel-chosen-mean-matching"}
    with pytest.raises(ValueError, match="with running statistics; add mean-matching"):
        federate(**NORMED | {"model": "mlp", "rounds": 1, "auto.candidates": "bn16"})


def test_a_share_that_few_clients_cannot_certify_is_refused():
    """Ten training clients: 1/11, rounded up."""
    with pytest.raises(ValueError, match=r"1/\(10 \+ 1\): write auto.alpha=0.091, or take 19 "):
        Auto().check_training_clients(10)
    Auto().check_training_clients(19)
    Auto(alpha=0.091).check_training_clients(10)
    said = fedapps("run", "--methods", "auto", "num-clients=20", "rounds=1", code=2)
    assert "auto.alpha is 0.05; 10 training clients certify no share" in said


def test_clients_without_labels_certify_no_share():
    """Of the 20 training clients half have labels."""
    arguments = ("num-clients=20", "train-fraction=1.0", "partition.labeled-clients=0.5")
    said = fedapps("run", "--methods", "auto", *arguments, "rounds=1", code=2)
    assert "auto.alpha is 0.05; 10 training clients certify no share" in said


class Stopping(Callback):
    """Ends training after the first round."""

    def round_ends(self, report, strategy):
        raise Stop


@pytest.mark.parametrize(("evaluate_every", "has_rule"), [(1, False), (5, True)])
def test_a_run_that_is_stopped_has_a_rule_or_says_that_it_has_none(
    evaluate_every, has_rule, tmp_path, monkeypatch
):
    """The first round is evaluated before it is known to be the last one, or after."""
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Stopping=Stopping))
    allow(f"{__name__}:Stopping")
    config = {"rounds": 3, "evaluate-every": evaluate_every, "callbacks": f"{__name__}:Stopping"}
    federate(**NORMED | config | {"output-dir": str(tmp_path)})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert ("novel-misfit" in json.loads(line)["evaluation"]) == has_rule
    log = tmp_path / "errors.log"
    words = "training ended after round 1 of 3, and the last round makes the rule"
    assert (log.exists() and words in log.read_text()) != has_rule


def test_coefficients_out_of_fold_are_those_of_the_other_clients():
    """Three clients in folds of their own: those of all are Newton's of all newcomers pooled, those
    without a fold are Newton's of the two other clients' newcomers."""
    client = training_client()
    nodes = [Node(i, 50 + i) for i in range(3)]
    strategy = Auto(alpha=0.5)
    exchanges = _Exchanges(strategy, client.initial, nodes)
    rule = rule_that_chooses(client, -1)
    draw = np.random.default_rng(0)

    def drawn_case():
        evidence = [draw.normal(size=(30, 10)) for _ in range(2)]
        outcomes = [draw.integers(0, 3, 30) for _ in range(2)]
        return Case(100, np.zeros(4), draw.normal(size=(2, 4)), evidence, outcomes)

    cases = {node: [drawn_case(), drawn_case()] for node in nodes}

    def exchange(action, payloads, like):
        replies = []
        for node, arrays in payloads.items():
            sums = derivatives(rule, cases[node], arrays["coefficients"])
            replies.append(replace(update(0, sums), node=node))
        return replies

    strategy.exchange = exchange
    found = exchanges.fitted(rule)
    assert found.shape == (2, 4, 2, 15)
    for place, left_out in enumerate([None, *nodes]):
        pooled = [case for node in nodes if node != left_out for case in cases[node]]
        theta = np.zeros((2, 1, 2, 15))
        for _ in range(8):
            sums = derivatives(rule, pooled, theta)
            gradient, hessian = sums["gradient"], sums["hessian"]
            for j in range(2):
                theta[j, 0] = newton_step(theta[j, 0], gradient[j, 0], hessian[j, 0])
        np.testing.assert_allclose(found[:, place], theta[:, 0], atol=1e-10)
    sent = exchanges.out_of_fold(rule, found)
    np.testing.assert_array_equal(sent[nodes[2]]["rule/coefficients"], found[:, 3])


def test_a_client_plays_by_the_statistics_of_the_other_clients():
    """Three clients in folds of their own. K, π, M, S and B without a fold are those of the two
    others. Each client has its residual from the means without its own fold."""
    clients = {}
    for number in range(3):
        clients[Node(number, 50 + number)] = AutoClient(
            network(), share(X ** (1 + number), Y.roll(number)), held_out=0.75
        )
    nodes = list(clients)
    exchanges = _Exchanges(Auto(alpha=0.5), clients[nodes[0]].initial, nodes)
    played = {}

    def exchange(action, payloads, like):
        query = action.partition(".")[2]
        replies = []
        for node, arrays in payloads.items():
            if query == "misfit":
                played[node] = arrays
                continue
            reply, _ = getattr(clients[node], query)(arrays, {})
            replies.append(replace(update(0, reply), node=node))
        return replies

    exchanges.strategy.exchange = exchange
    source, by_fold = exchanges.statistics()
    for left_out, without in zip(nodes, by_fold, strict=True):
        others = [node for node in nodes if node != left_out]
        alone = _Exchanges(exchanges.strategy, exchanges.arrays, others)
        answers = alone.answers("moments", alone.to_all(alone.arrays), {})
        expected = alone.sums_by_set(answers, "counts")[0]
        means = class_means(expected["counts"], expected["sums"])
        np.testing.assert_allclose(without["means"], means, rtol=1e-6)
        np.testing.assert_allclose(without["prior"], prior(expected["confusion"].sum(0)))
        assert np.abs(without["means"] - source["means"]).max() > 1e-3
    with pytest.raises(Unanswered):
        exchanges.with_misfits(by_fold)
    for node, without in zip(nodes, by_fold, strict=True):
        np.testing.assert_array_equal(played[node]["source/means"], without["means"])


def test_a_client_like_those_of_training_looks_so_though_they_are_few_and_the_network_is_wide(
    tmp_path,
):
    """Four training clients with 36 held-out samples and 200 values before the head: as newcomers
    their samples fit the statistics that they are part of far better than novel clients' do, whose
    T was 7.1 in the mean, over a limit of 2.2."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(600, 6)).astype("float32")
    np.savez(tmp_path / "x.npz", x=x, y=x[:, :3].argmax(1))
    config = {"method": "auto", "model": "mlp", "dataset": str(tmp_path / "x.npz")}
    config |= {"num-clients": 10, "train-fraction": 0.4, "partition": "iid", "rounds": 2}
    config |= {"auto.alpha": 0.3, "auto.held-out": 0.6, "auto.plays": 20, "evaluate-every": 2}
    result, _ = federate(**ALL_SAMPLES | config)
    metrics = dict(result.evaluate_metrics_clientapp[2])
    assert metrics["novel-misfit"] <= metrics["novel-misfit-limit"]


@pytest.mark.parametrize("rounds", [0, 1])
def test_without_an_answer_clients_keep_fedavgs_model(rounds, monkeypatch, tmp_path):
    """Also in a run that starts from one with a rule, which is that of another model."""
    federate(**NORMED, rounds=1, **{"output-dir": str(tmp_path / "former")})

    def silent(self, arrays, config):
        raise OSError("no time")

    monkeypatch.setattr(AutoClient, "moments", silent)
    further = {"from-dir": str(tmp_path / "former"), "output-dir": str(tmp_path / "run")}
    result, _ = federate(**NORMED, rounds=rounds, **further)
    metrics = dict(result.evaluate_metrics_clientapp[rounds])
    assert "novel-accuracy" in metrics and "novel-misfit" not in metrics
    causes = (tmp_path / "run" / "errors.log").read_text()
    assert "auto: no rule\nno training client has answered query.moments" in causes
    report = load(tmp_path / "run").personalize(X).report
    assert report["decision"] == f"{KEPT}: the run has no rule, and its log says why"


def test_a_run_that_starts_from_a_saved_one_makes_the_same_rule(tmp_path):
    """Its clients play the same newcomers of the same model, whatever the number of the round."""
    folder = str(tmp_path / "former")
    former, _ = federate(**NORMED, **{"output-dir": folder})
    again, _ = federate(**NORMED | {"rounds": 0}, **{"from-dir": folder})
    expected = dict(former.evaluate_metrics_clientapp[2])
    assert "novel-misfit-limit" in expected
    summary = json.loads((tmp_path / "former" / "summary.json").read_text())
    assert {each["regime"] for each in summary["played"]} <= {"label-shift", "other-inputs"}
    assert summary["played"]
    assert dict(again.evaluate_metrics_clientapp[0]) == expected


def test_a_client_that_misses_the_first_misfit_is_asked_nothing_more_about_newcomers():
    """It has none: its later answers were 12 errors that named the wrong cause."""

    class Losing(InProcessGrid):
        asked: ClassVar[list[str]] = []  # what node 1 was asked, up to the lost message

        def answer(self, messages, timeout):
            kept = []
            for message in messages:
                kind = message.metadata.message_type
                lost = False
                if message.metadata.dst_node_id == 1 and kind.startswith("query."):
                    lost = kind == "query.misfit"
                    self.asked.append(kind)
                if not lost:
                    kept.append(message)
            return super().answer(kept, timeout)

    result, strategy = own_app(Losing)
    assert Losing.asked == ["query.moments", "query.spread", "query.misfit"]
    assert strategy.rule["guard"].shape == (2,)
    assert result.evaluate_metrics_clientapp[1]["train-clients"] == 4


@pytest.mark.parametrize("model", ["convnet-bn", "convnet"])
def test_inputs_without_finite_numbers_keep_the_model_and_a_stream_says_so(model):
    """One input of 30 is infinite, and is kept for the next update."""
    client = training_client(model, candidates="bbse,bn16" if model == "convnet-bn" else "bbse")
    other, x = served(client, source_of(client), rule_that_chooses(client, 0))
    x = torch.cat([x, x[:5]])
    endless = x.clone()
    endless[3] = torch.inf
    torch.testing.assert_close(
        other.predict(endless), Client.predict(other, endless), equal_nan=True
    )
    words = "for 1 of 30 inputs the network gives numbers that are not finite"
    assert other.choice == ("none", f"{KEPT}: {words}")
    assert other.adaptation_metrics["chosen-none"] == 1 and "misfit" not in other.adaptation_metrics
    other.predict(x)
    other.stream["chosen"] = torch.tensor(0)
    other.update(endless)
    assert other.choice.reason.startswith(f"Changed from bbse to none. {KEPT}: for 1 of 60 inputs")
    assert int(other.stream["chosen"]) == KEEP


def test_batch_statistics_without_finite_numbers_change_no_prediction():
    """The square of 1e25 is beyond float32, so that the variance of such inputs is infinite."""
    client = training_client(candidates="bn0,bn16")
    other, x = served(client, source_of(client), rule_that_chooses(client, 1))
    _, views = other.case(x * 1e25)
    assert all(torch.isfinite(view).all() for view in views.values())
    other.predict(x * 1e25)
    assert "nan" not in other.choice.reason


def test_a_rule_goes_with_its_model():
    """Training changes the model, so what was made before is dropped."""
    strategy = Auto(alpha=0.5)
    strategy.source = {"prior": np.ones(2)}
    strategy.rule = {"guard": np.ones(2)}
    strategy.broadcast({}, [])
    assert not strategy.source and not strategy.rule


def test_few_training_clients_cannot_choose_and_the_run_says_so():
    """One client certifies nothing below 1/2: no k keeps α = 0.3. Outside, no client has newcomers,
    as with tokens, which no change of the package fits: another α would not help."""
    said = []
    strategy = Auto(alpha=0.3, on_failure=said.append)
    client = training_client()
    exchanges = _Exchanges(strategy, client.initial, [Node(0, 50)])
    none = {name: np.zeros((2, 101)) for name in ("loss", "corrected", "gain")}
    none["clients"] = np.array([1.0, 0.0])
    strategy.exchange = lambda action, payloads, like: [update(0, none)]
    rule = rule_that_chooses(client, -1)
    rule = exchanges.with_guard(rule, np.zeros((2, 2, 2, 14)))
    assert (rule.guard == NEVER).all()
    assert [text.partition("\n")[0] for text in said] == ["auto: no choice"] * 2
    assert "1 training client played newcomers that label shift explains, and no" in said[0]
    assert "; raise auto.alpha, or take more training clients" in said[0]
    assert "no training client played newcomers that label shift does not explain" in said[1]
    assert "raise auto.plays, or name changes" in said[1] and "auto.alpha" not in said[1]


def test_a_client_that_claims_less_than_no_sample_takes_no_class_from_others():
    """Its counts are -1000 of each class, and count as 0."""
    client = training_client()
    exchanges = _Exchanges(Auto(alpha=0.5), client.initial, [Node(i, 50 + i) for i in range(2)])

    def exchange(action, payloads, like):
        honest, _ = getattr(client, action.partition(".")[2])(next(iter(payloads.values())), {})
        false = {name: np.zeros_like(array) for name, array in honest.items()}
        for name in {"confusion", "counts"} & {*honest}:
            false[name] = np.full_like(honest[name], -1000)
        return [update(0, honest), update(1, false)]

    exchanges.strategy.exchange = exchange
    source, _ = exchanges.statistics()
    assert source["present"].tolist() == [1, 1, 1]
    expected = source_of(client, idle=1)
    for name in ("confusion", "prior", "means"):
        np.testing.assert_allclose(source[name], expected[name], rtol=1e-6)


@pytest.mark.parametrize(("name", "limits"), [("convnet-bn", [0, NEVER]), ("convnet", [3, 0])])
def test_without_statistics_the_guard_also_counts_among_those_that_get_a_correction(name, limits):
    """Of 40 clients' newcomers 2 in all are harmed, of 8 that get a correction, up to k = 2.9; at
    α = 0.1 that is too many of these alone. Where label shift explains none, nobody gets one."""
    client = training_client(name)
    exchanges = _Exchanges(Auto(alpha=0.1), client.initial, [Node(i, 50 + i) for i in range(40)])
    answer = {"loss": np.zeros((2, 101)), "corrected": np.zeros((2, 101)), "clients": np.ones(2)}
    answer["loss"][0, :30], answer["corrected"][0] = 2 / 40, 8 / 40
    answer["gain"] = np.zeros((2, 101))
    replies = [update(i, answer) for i in range(40)]
    exchanges.strategy.exchange = lambda action, payloads, like: replies
    sets = np.zeros((len(client.names), 6, 2, 14))
    rule = exchanges.with_guard(rule_that_chooses(client, -1), sets)
    assert rule.guard.tolist() == pytest.approx(limits)


@pytest.mark.parametrize(("alpha", "limits"), [(0.0, [3, 0]), (0.03, [3, 3]), (0.06, [0, 0])])
def test_by_default_the_guard_is_stricter_where_label_shift_explains_the_inputs(alpha, limits):
    """Of 60 clients' newcomers 1.5 in all are harmed, up to k = 2.9: (1.5 + 1) / 61 = 0.041 is more
    than 0.025, and less than 0.05."""
    client = training_client()
    exchanges = _Exchanges(Auto(alpha=alpha), client.initial, [Node(i, 50 + i) for i in range(60)])
    answer = {name: np.ones((2, 101)) for name in ("loss", "corrected", "gain")}
    answer["loss"][:, :30], answer["loss"][:, 30:] = 1.5 / 60, 0
    answer["clients"] = np.ones(2)
    replies = [update(i, answer) for i in range(60)]
    exchanges.strategy.exchange = lambda action, payloads, like: replies
    sets = np.zeros((len(client.names), 6, 2, 14))
    rule = exchanges.with_guard(rule_that_chooses(client, -1), sets)
    assert rule.guard.tolist() == pytest.approx(limits)


def test_a_run_says_what_its_rule_means_for_played_newcomers():
    """Of 40 clients 8 have a harmed newcomer up to k = 0.9, a fifth; from k = 1.0 on a half gets a
    correction, 1 of 40 is harmed and (39 · 3 − 10) / 40 = 2.675 points are gained. Label shift
    explains none. A client can gain at most what it says is corrected."""
    client = training_client()
    exchanges = _Exchanges(Auto(alpha=0.1), client.initial, [Node(i, 50 + i) for i in range(40)])
    replies = []
    for i in range(40):
        answer = {name: np.zeros((2, 101)) for name in ("loss", "corrected", "gain")}
        answer["clients"] = np.array([0.0, 1.0])
        answer["corrected"][1, :10], answer["corrected"][1, 10:] = 0.8, 0.5
        answer["loss"][1, :10] = i < 8
        answer["loss"][1, 10:] = i == 0
        answer["gain"][1] = 0.03 if i else -0.1
        replies.append(update(i, answer))
    exchanges.strategy.exchange = lambda action, payloads, like: replies
    sets = np.zeros((len(client.names), 6, 2, 14))
    exchanges.with_guard(rule_that_chooses(client, -1), sets)
    (played,) = exchanges.strategy.now.report["played"]
    assert played.pop("regime") == "other-inputs"
    expected = {"clients": 40, "guard": 1.0, "corrected": 0.5, "gain": 0.02675}
    assert played == pytest.approx(expected | {"harmed": 0.5 / 40})
    replies[0].arrays["gain"][1] = -9
    exchanges.with_guard(rule_that_chooses(client, -1), sets)
    (played,) = exchanges.strategy.now.report["played"]
    assert played["gain"] == pytest.approx((39 * 0.03 - 0.5) / 40)


def test_a_layer_that_sees_no_batch_says_nothing_of_a_client():
    """T_0 is -29.7 for all. The rule is sent in float32: its error is no deviation."""
    strategy = Auto(alpha=0.5)
    client = training_client()
    exchanges = _Exchanges(strategy, client.initial, [Node(0, 50)])
    misfits = np.array([[-29.7, 0.0, 1.0, 2.0], [-29.7, 1.0, 3.0, 2.5], [-29.7, 2.0, 2.0, 1.0]])
    first = {"count": np.array([3.0]), "sum": misfits.sum(0), "square": (misfits**2).sum(0)}
    first["sizes"] = np.array([3.0, 1.0, 0.0])
    histograms = {"misfits": np.ones(2000), "descriptors": np.zeros((2, 4, 1200))}
    answers = iter([first, histograms])
    strategy.exchange = lambda action, payloads, like: [update(0, next(answers))]
    rule = exchanges.with_misfits([{}])
    sent = Rule.of({name: a.astype(np.float32) for name, a in rule.arrays().items()})
    assert sent.largest_size == 50
    deviations = (misfits[0] - sent.misfit_mean) / sent.misfit_deviation
    assert deviations == pytest.approx([0, -(1.5**0.5), -(1.5**0.5), 0.267], abs=2e-3)


class Normed(torch.nn.Module):
    """A layer of batch normalisation that is called twice and has two names, one of instance
    normalisation with running statistics, and a mean of another kind."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(c, 4, 3, padding=1) for c in (1, 4))
        self.norm = torch.nn.BatchNorm2d(4)
        self.again = self.norm
        self.instance = torch.nn.InstanceNorm2d(4, track_running_stats=True)
        self.register_buffer("running_mean", torch.tensor(0.5))
        self.head = torch.nn.Linear(4 * 64, 3)

    def features(self, x):
        x = self.norm(self.first(x - self.running_mean)).relu()
        return self.instance(self.again(self.second(x)).relu()).flatten(1)

    def forward(self, x):
        return self.head(self.features(x))


class Functional(Normed):
    """The layer `norm` is there for its arrays alone: it is not called."""

    def features(self, x):
        norm = self.norm
        x = F.batch_norm(self.first(x), norm.running_mean, norm.running_var)
        return self.instance(self.second(x)).flatten(1)


def test_layers_that_are_never_called_are_said_before_a_run():
    settings = {"model": "my-network", "candidates": "bbse,bn16", "plays": 5, "shape": (1, 8, 8)}
    network = Functional()
    (line,) = AutoClient.caveats(network, **settings)
    assert line.startswith("the forward pass of my-network never calls norm, again, so what enters")
    assert not network.norm._forward_pre_hooks
    # Of a network that takes other inputs nothing is known.
    assert AutoClient.caveats(network, **settings | {"shape": (3, 8, 8)}) == []
    assert AutoClient.caveats(Normed(), **settings) == []


def test_a_layer_of_torch_jit_is_refused():
    network = nn.Sequential(torch.jit.script(nn.Sequential(nn.BatchNorm2d(1))), nn.Flatten())
    network.head = nn.Linear(64, 3)
    with pytest.raises(ValueError, match=r"enters '0\.0', a layer of torch\.jit, .* no hooks"):
        AutoClient.build(network, partitions.task(SMALL), candidates="bbse", changes=EVERY)


def test_server_and_clients_know_the_same_layers():
    """The server sees arrays alone: `exchange` compares the shapes of the answers."""
    client = AutoClient(Normed(), share(X, Y), held_out=0.75)
    assert client.blocks.sizes == (4, 4, 4, 3, 4)
    assert source_of(client)["means"].shape == (3, 19)
    phi, _ = client.inner_values(X)
    first, second, _, *_ = client.blocks.split(phi)
    np.testing.assert_array_equal(first, second)


def test_a_layer_that_is_called_twice_predicts_as_the_model_that_is_served():
    torch.manual_seed(0)
    client = AutoClient(Normed(), share(X, Y), held_out=0.75)
    source, rule = source_of(client), rule_that_chooses(client, 1)
    other = AutoClient(client.model, replace(share(X, Y), novel=True))
    arrays = dict(client.initial)
    arrays |= {f"source/{name}": a for name, a in source.items()}
    arrays |= {f"rule/{name}": a for name, a in rule.arrays().items()}
    other.receive(arrays, {})
    z = other.predict(X.square())
    assert other.choice.name == "bn16"
    torch.testing.assert_close(other.personal_model(X)(X.square()), z)


def test_changes_that_the_inputs_do_not_have_are_refused():
    for changes in ("column-noise", "column-noise,column-shift"):
        with pytest.raises(ValueError, match=r"none of these changes inputs .* gaussian, salt"):
            federate(**NORMED, **{"auto.changes": changes})


def test_tokens_are_played_unchanged():
    """Whole numbers have no changes; newcomers differ in their classes alone."""
    tokens = torch.randint(0, 9, (40, 5), generator=torch.Generator().manual_seed(0))
    tokens_share = share(tokens, Y)
    whole = replace(tokens_share.train, whole=True)
    torch.manual_seed(0)
    tokens_share = replace(tokens_share, train=whole)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4))
    model.add_module("head", torch.nn.Linear(4, 3))
    client = AutoClient(model, tokens_share, held_out=0.75)
    client.source = source_of(client)
    assert not client.held_out_samples()[0].is_floating_point()
    assert all(case.unchanged for case in client.played())


class Words(torch.nn.Module):
    """A network of token ids, and of a mask if there is one."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, ids, mask=None):
        mask = torch.ones_like(ids) if mask is None else mask
        return self.head((self.embedding(ids) * mask[..., None]).mean(1))


@pytest.mark.parametrize("names", [(), ("ids", "mask")])
def test_tokens_of_a_users_app_are_played_unchanged(names):
    """Its samples are floats, in which several inputs of a sample are packed."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 9, (40, 5), generator=generator) for _ in range(max(len(names), 1))]
    parts = [Part(name, (5,), True) for name in names]
    x = packed(tokens, stacked=True) if parts else tokens[0].float()
    shape = tuple(x.shape[1:])
    network, _ = adopted(Words(), "words", shape, 3, parts=parts)
    network = headed(network, "auto", shape, 3)
    client = AutoClient(network, share(x, Y), held_out=0.75)
    client.source = source_of(client)
    assert client.held_out_samples()[0].is_floating_point()
    assert len(list(client.played())) == 5
    assert all(case.unchanged for case in client.played())
    info = Info("own", shape, 3, "")
    with pytest.raises(ValueError, match=r"none of these changes .* your own, as module:NAME"):
        AutoClient.build(network, info, candidates="bbse", changes="column-noise")


def test_a_client_that_would_train_further_has_no_rule():
    with pytest.raises(ValueError, match="auto cannot learn from novel-shots"):
        federate(**NORMED, **{"novel-shots": 1})


def test_without_a_newcomer_there_is_no_rule():
    """Clients of the main job's digits hold out too few samples: no T, no threshold, no choice."""
    strategy = Auto(alpha=0.5)
    client = training_client()
    exchanges = _Exchanges(strategy, client.initial, [Node(0, 50)])
    none = {"count": np.zeros(1), "sum": np.zeros(4), "square": np.zeros(4), "sizes": np.zeros(3)}
    strategy.exchange = lambda action, payloads, like: [update(0, none)]
    with pytest.raises(Unanswered, match="needs 20 held-out samples: raise held-out"):
        exchanges.with_misfits([{}])


def test_more_inputs_than_newcomers_had_change_no_weight_of_the_training_statistics():
    """The mean 10 of the inputs, and 0 of training. Of 16 prior samples and 80 inputs the training
    statistics have the weight 16/96: the mean is 8.333. Where newcomers had at most 50 inputs it is
    16/66: 7.576. A client of 50 inputs has that weight, too."""
    model = headed(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 3)), "auto", (1,), 3)
    client = AutoClient(model, share(torch.rand(40, 1), Y))
    x = torch.tensor([[9.0], [11.0]]).repeat(40, 1)

    def mean_of(x):
        changes, _ = client.with_statistics(x, 16.0)
        (mean,) = (array for name, array in changes.items() if name.endswith("running_mean"))
        return mean.item()

    assert mean_of(x) == pytest.approx(10 * 80 / 96)
    client.rule = {"largest-size": np.array(50.0, np.float32)}
    assert mean_of(x) == pytest.approx(10 * 50 / 66)
    assert mean_of(x[:50]) == pytest.approx(10 * 50 / 66)
    assert mean_of(x[:20]) == pytest.approx(10 * 20 / 36)


def test_a_client_whose_held_out_samples_have_no_label_answers_with_zeros():
    """Its network may not take an empty batch."""
    client = AutoClient(network(), share(X, torch.full((40,), UNLABELED)), held_out=0.5)
    for array in client.moments(client.initial, {})[0].values():
        assert not array.any()
    means = {"source/means": np.zeros((3, client.blocks.width))}
    spread, _ = client.spread(client.initial | means, {})
    assert {*spread} == {"squares", "inverse", "clients"}
    assert not any(array.any() for array in spread.values())
    assert list(client.played()) == []


def test_clients_that_hold_out_nothing_do_not_count_in_the_covariance_between_clients():
    """Of two clients one answers with zeros: B is that of the other one alone."""
    client = training_client()
    alone = source_of(client)
    beside = source_of(client, idle=1)
    for name in alone:
        np.testing.assert_array_equal(alone[name], beside[name])
    assert alone["between"].any()


def test_without_a_label_in_what_is_held_out_there_is_no_rule():
    strategy = Auto(alpha=0.5)
    client = training_client()
    exchanges = _Exchanges(strategy, client.initial, [Node(0, 50)])
    strategy.exchange = lambda action, payloads, like: [
        update(0, {name: np.zeros(array.shape) for name, array in like[Node(0, 50)].items()})
    ]
    with pytest.raises(Unanswered, match="no training client has a held-out sample with a label"):
        exchanges.statistics()


def test_without_the_players_of_newcomers_there_is_no_limit():
    """They answer once, and others the second time: the limit of no newcomer would be −10."""
    client = training_client()
    exchanges = _Exchanges(Auto(alpha=0.5), client.initial, [Node(0, 50)])

    def exchange(action, payloads, like):
        expected = next(iter(like.values()))
        answer = {name: np.zeros(a.shape) for name, a in expected.items()}
        if "count" in answer:
            answer["count"] += 3
        return [update(0, answer)]

    exchanges.strategy.exchange = exchange
    with pytest.raises(Unanswered, match="no client that has played newcomers has answered"):
        exchanges.with_misfits([{}])


@pytest.mark.parametrize("place", [-1, 0, 1])
def test_a_model_has_the_same_arrays_whatever_is_chosen(place):
    """Its head has no bias: a saved model is loaded into the network of another choice."""
    model = network()
    torch.manual_seed(2)
    model.head = torch.nn.Linear(model.head.in_features, 3, bias=False)
    client = AutoClient(model, share(X, Y), held_out=0.75)
    source, rule = source_of(client), rule_that_chooses(client, place)
    source["prior"] = np.array([0.1, 0.2, 0.7], np.float32)
    other = AutoClient(model, replace(share(X, Y), novel=True))
    arrays = dict(client.initial)
    arrays |= {f"source/{name}": a for name, a in source.items()}
    arrays |= {f"rule/{name}": a for name, a in rule.arrays().items()}
    other.receive(arrays, {})
    z = other.predict(X.square())
    served = other.personal_model(X)
    assert served.head.bias.shape == (3,)
    torch.testing.assert_close(served(X.square()), z, rtol=1e-4, atol=1e-5)
    assert other.choice.name == ("none", "mean-matching", "bn16")[place + 1]


def test_newcomers_are_played_before_they_are_asked_for():
    client = training_client()
    with pytest.raises(ValueError, match=r"query\.misfit comes first"):
        client.play({}, {})


def linear():
    return torch.nn.Linear(3, 3)


def own_app(grid_class=InProcessGrid, network=linear):
    """The result and the strategy of a user's app. Four nodes have labels and one has none: the
    label of a training sample is the largest of its three columns."""

    def data(context):
        number = context.node_config["partition-id"]
        x = torch.rand(60, 3, generator=torch.Generator().manual_seed(number))
        y = x.argmax(1)
        return x if number == 4 else ((x, y), (x, y))

    ended = []
    client = client_app("auto", model=network, data=data, lr=0.5, local_steps=5, held_out=0.5)
    server = server_app(
        "auto", model=network, shape=(3,), min_available_nodes=5, alpha=0.3,
        then=lambda *result: ended.extend(result), rounds=1,
    )  # fmt: skip
    grid = grid_class(client, {}, [{"partition-id": number} for number in range(5)])
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    return ended


def test_a_flower_app_of_a_user_makes_the_rule_and_its_unlabeled_node_keeps_to_it():
    """Nodes answer all exchanges, and the evaluated nodes say what they chose."""
    result, strategy = own_app()
    assert sorted(node.novel for node in strategy.nodes) == [False] * 4 + [True]
    assert strategy.rule["guard"].shape == (2,) and strategy.source["means"].shape == (3, 14)
    scores = dict(result.evaluate_metrics_clientapp[1])
    for role in ("train", "novel"):
        assert scores[f"{role}-chosen-none"] + scores[f"{role}-chosen-mean-matching"] == 1
        assert np.isfinite(scores[f"{role}-misfit"])
    assert scores["train-clients"] == 4 and "novel-accuracy" not in scores


def instance_normed():
    """Its only layer with running statistics is one of instance normalisation."""
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (1, 3)), norm, nn.Flatten(), nn.Linear(3, 3))


def test_running_statistics_of_another_layer_are_read_and_are_no_candidate():
    """The blocks are the layer's one channel, the softmax and the last; bn16 would change nothing.
    The server knows the layer by the network that it is given."""
    _, strategy = own_app(network=instance_normed)
    assert strategy.source["means"].shape == (3, 1 + 3 + 4)
    assert strategy.rule["ranges"].shape == (1, 4, 2)
    client = AutoClient(headed(instance_normed(), "auto", (3,), 3), share(torch.rand(40, 3), Y))
    assert client.names == ("mean-matching",)
    _, base = client.inner_values(torch.rand(5, 3))
    views, _, _ = client.views(torch.rand(5, 3), base, one_class_each(3), np.full(3, 1 / 3))
    assert [*views] == ["bbse", "mean-matching", "em"]


def test_mean_matching_corrects_by_proportions_in_which_the_prior_counts_as_16_samples():
    """q = (0.5, 0.5, 0) of 4 inputs and π = (0.2, 0.3, 0.5): (4 q + 16 π) / 20 = (0.26, 0.34, 0.4).
    Newcomers had at most 4 inputs, so 100 inputs count as 4."""
    client = AutoClient(headed(instance_normed(), "auto", (3,), 3), share(torch.rand(40, 3), Y))
    prior = np.array([0.2, 0.3, 0.5])
    statistics = replace(one_class_each(3), prior=prior)
    client.rule = {"largest-size": np.array(4)}
    for n in (4, 100):
        base = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
        views, _, _ = client.views(torch.rand(n, 3), base, statistics, np.array([0.5, 0.5, 0]))
        ratio = torch.tensor([0.26 / 0.2, 0.34 / 0.3, 0.4 / 0.5]).log()
        torch.testing.assert_close(views["mean-matching"], base + ratio)


def one_class_each(classes):
    """Statistics with a perfect classifier and equal classes."""
    empty = np.zeros(0)
    confusion, prior = np.eye(classes), np.full(classes, 1 / classes)
    return Statistics(Blocks(()), empty, empty, empty, confusion, prior, prior > 0)


def test_a_rule_of_other_candidates_is_refused():
    """As one of a former release, to which any running statistics were batch normalisation's."""
    client = training_client("convnet")
    rule = rule_that_chooses(client, -1)
    two = replace(rule, ranges=np.tile(rule.ranges, (2, 1, 1)))
    other, x = served(client, source_of(client), two)
    words = "rule is of 2 corrections, and auto has mean-matching for this"
    with pytest.raises(ValueError, match=words):
        other.predict(x)


def test_a_rule_of_a_former_release_is_refused():
    """It compared one corrected network less, and did not say which classes have samples."""
    client = training_client("convnet")
    source = source_of(client)
    del source["present"]
    other, x = served(client, source, rule_that_chooses(client, -1))
    with pytest.raises(ValueError, match="does not say which classes it knows: another release"):
        other.predict(x)
