"""Personal models for novel clients; A-distances; the bound's terms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import at_once, federate, share, update

from clients.core.domain import domain_gradient
from clients.core.own_scores import named_scores
from clients.methods.pfl import PFLClient, PFLSampledClient
from clients.models import build_model
from partitions.shares import Samples
from strategies.core import domain_distances
from strategies.core.domain_distances import a_distances
from strategies.core.replies import Node, Update
from strategies.core.round_state import Round
from strategies.methods import pfl
from strategies.methods.pfl import PFL, PFLEnsemble, PFLNearest

SETTINGS = {"num-clients": 6, "local-steps": 4, "rounds": 2, "evaluate-every": 2}
STEPS = domain_distances.STEPS  # before conftest.py lowers it


@pytest.fixture(autouse=True)
def whole_distances(monkeypatch):
    monkeypatch.setattr(domain_distances, "STEPS", STEPS)


def go(**changes):
    """Run SETTINGS with `changes` in process; returns the result and the grid."""
    return federate(**SETTINGS | changes)


def samples(x):
    return Samples(x, torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x)), scale=1.0)


def test_half_a_classifier_learns_from_three_of_five_inputs_and_errs_on_the_others():
    """Seed 2 draws the inputs 3, 4, 1, then 0 and 2. Two classifiers of one input and a bias; with
    z = w (x − ½) + b each has its own gradient, mean (σ(z) − side)·(x − ½, 1). On the others z is
    0.15 and 1.25, or 0.1 and −1: label 0 is missed by both and by one of them."""
    x, w = np.array([0.6, 0.9, 1.7, 0.5, 1.3]), np.array([[1.0, 0.05], [-1.0, 0.2]])
    order = [3, 4, 1, 0, 2]
    assert torch.randperm(5, generator=torch.Generator().manual_seed(2)).tolist() == order
    for side in (0, 1):
        fit = x[order[:3]] - 0.5
        slope = 1 / (1 + np.exp(-(w[:, :1] * fit + w[:, 1:]))) - side
        expected = np.stack([(slope * fit).mean(1), slope.mean(1)], 1)
        one = samples(torch.tensor(x, dtype=torch.float32)[:, None])
        found = domain_gradient(one, torch.tensor(w, dtype=torch.float32), float(side), 2)
        np.testing.assert_allclose(found["gradient"], expected, rtol=1e-5)
        assert found["error"].tolist() == ([1.0, 0.5] if side == 0 else [0.0, 0.5])


@pytest.mark.parametrize("base", ["fedper", "pfedhn"])
def test_training_clients_get_what_the_base_gives_them(base):
    """PFL over a base changes nothing about training: the training clients' numbers agree."""
    same = {"lr": 0.1, "momentum": 0.0, "weight-decay": 0.0}
    own = {f"pfedhn.{key}": value for key, value in same.items()}
    one, _ = go(method=base, **same, **own)
    two, _ = go(method="pfl-ensemble", **same, **{"pfl-ensemble.base": base})
    numbers = [dict(r.evaluate_metrics_clientapp[2]) for r in (one, two)]
    assert numbers[0]["train-accuracy"] == numbers[1]["train-accuracy"]


def test_the_bounds_terms_are_reported():
    """êrr is one minus the accuracy on the training samples; distances lie in [0, 1]."""
    result, _ = go(method="fedavg", **{"report-generalization-bound": True})
    numbers = dict(result.evaluate_metrics_clientapp[2])
    assert 0 <= numbers["train-training-error"] <= 1
    assert 0 < numbers["novel-half-distance"] <= 1
    plain, _ = go(method="fedavg")
    assert (
        not {"train-training-error", "novel-half-distance"}
        & plain.evaluate_metrics_clientapp[2].keys()
    )


def test_a_distance_by_hand_for_every_pair():
    """Two novel and three training clients. Novel ones send the gradient −1, training ones +3: the
    mean is +1, and 40 steps of Adam at 0.05 against it make every weight −2. Errors 0.1 i + 0.02 j
    and 0.05 j + 0.01 i: d_ij = 2(1 − 2 · their mean). A novel client's label is 1."""
    nodes = [Node(c, 50 + c, c < 2, {"input-size": 3}) for c in range(5)]
    last = {}

    def exchange(action, payloads, config, like):
        found = []
        for node, arrays in payloads.items():
            w, i, j = arrays["weights"], node.client, node.client - 2
            assert config["side"] == (1 if node.novel else 0)
            error = 0.1 * i + 0.02 * np.arange(3) if node.novel else 0.05 * j + 0.01 * np.arange(2)
            gradient = np.full_like(w, -1 if node.novel else 3)
            last[node] = w
            found.append(Update(node, {"gradient": gradient, "error": error}, 1, {}))
        return found

    d = a_distances(at_once(exchange), nodes[:2], nodes[2:])
    for i in range(2):
        for j in range(3):
            got = 0.1 * i + 0.02 * j + 0.05 * j + 0.01 * i
            assert d[i, j] == pytest.approx(2 - 2 * got, rel=1e-6)
    assert all(w == pytest.approx(-2.0, rel=1e-3) for w in last.values())
    assert [w.shape for w in last.values()] == [(3, 4)] * 2 + [(2, 4)] * 3


def test_an_error_above_a_half_is_a_distance_below_zero():
    """Errors 0.6 and 0.8 of a pair: 2(1 − 2·0.7) = −0.8. Beyond 1 an error counts as 1: −2."""
    nodes = [Node(c, 50 + c, c < 1, {"input-size": 1}) for c in range(3)]

    def exchange(action, payloads, config, like):
        replies = []
        for node, arrays in payloads.items():
            error = (
                np.array([0.6, 7.0]) if node.novel else np.array([0.8 if node.client < 2 else 7])
            )
            gradient = np.zeros_like(arrays["weights"])
            replies.append(Update(node, {"gradient": gradient, "error": error}, 1, {}))
        return replies

    d = a_distances(at_once(exchange), nodes[:1], nodes[1:])
    np.testing.assert_allclose(d, [[-0.8, -2.0]], rtol=1e-6)


def novel_with(cls, *weights):
    """A novel client with the input 1, label 0, that was sent models of these two weights."""
    own = replace(share(torch.ones(1, 1), [0]), novel=True)
    client = cls(build_model("mlp-small", (1,), 2, 0), own)
    client.model = torch.nn.Linear(1, 2, bias=False)
    sent = {f"{i}/weight": np.float32(w)[:, None] for i, w in enumerate(weights)}
    return client, sent


def test_the_ensemble_is_the_mean_of_logits():
    """(4, 0) and (0, 2): (2, 1), neither their sum nor a mean of softmaxes."""
    client, sent = novel_with(PFLClient, (4, 0), (0, 2))
    client.receive(sent, {})
    x = torch.ones(1, 1)
    assert client.predict(x).tolist() == [[2.0, 1.0]]
    torch.testing.assert_close(client.personal_model(x)(x), torch.tensor([[2.0, 1.0]]))


def test_a_sampled_models_score_is_the_mean_of_the_models_scores():
    """Of (4, 0), (0, 2), (0, 1) one is right for label 0: 1/3, where their mean logits would be;
    the loss is the mean of ln(1 + e⁻⁴), ln(1 + e²), ln(1 + e). The user's own score has all three
    predictions."""
    client, sent = novel_with(PFLSampledClient, (4, 0), (0, 2), (0, 1))
    client.own_scores = named_scores({"first": lambda z, y: z[:, 0].mean() - y.sum()})
    loss, count, metrics = client.score(sent, {})
    assert metrics["first"] == pytest.approx(4 / 3)
    assert (metrics["accuracy"], count) == (pytest.approx(1 / 3), 1)
    assert loss == pytest.approx(np.log1p(np.exp([-4, 2, 1])).mean(), rel=1e-5)


def test_one_input_is_both_halves():
    """w = 3, b = 0, x − ½ = ⅕: σ(0.6)·(⅕, 1), and label 0 is missed."""
    found = domain_gradient(samples(torch.tensor([[0.7]])), torch.tensor([[3.0, 0.0]]), 0.0, 2)
    slope = 1 / (1 + np.exp(-0.6))
    np.testing.assert_allclose(found["gradient"], [[slope / 5, slope]], rtol=1e-5)
    assert found["error"].tolist() == [1.0]


def test_a_head_that_never_trained_is_not_handed_out(monkeypatch):
    """Of three training clients one is drawn for the only round."""
    handed, whole = [], PFL.personal_models
    monkeypatch.setattr(
        PFL, "personal_models", lambda *args: handed.append(whole(*args)) or handed[0]
    )
    go(method="pfl-sampled", rounds=1, **{"fraction-train": 0.3, "evaluate-every": 1})
    assert [len({name.partition("/")[0] for name in models}) for models in handed] == [1]


def test_what_is_handed_out_is_the_body_that_was_sent_under_the_own_head():
    """Body 7 as sent; the head 5 that the client kept, or before it has trained its first, 3."""
    first = build_model("mlp-small", (1,), 2, 0)
    client = PFLClient(first, share(torch.ones(1, 1), [0]))
    arrays = client.initial = {n: np.full_like(a, 3) for n, a in client.initial.items()}
    sent = {n: np.full_like(a, 7) for n, a in arrays.items() if not n.startswith("head.")}
    for kept, head in ((None, 3), (5, 5)):
        if kept:
            own = {n: np.full_like(a, kept) for n, a in arrays.items() if n.startswith("head.")}
            client.state = {f"personal/{name}": a for name, a in own.items()}
        found, _ = client.export(sent, {})
        assert {n: float(a.mean()) for n, a in found.items()} == {
            n: head if n.startswith("head.") else 7 for n in arrays
        }


def test_a_served_client_draws_a_model_of_its_own():
    """Of eight models with weights 0 … 7: clients draw by their ids, the same one every time."""
    drawn = []
    for number in (0, 1, 2, 3, 0):
        client, sent = novel_with(PFLSampledClient, *[(w, 0) for w in range(8)])
        client.client = number
        model, logits = client.serve(sent, {})
        assert torch.equal(logits, model(torch.ones(1, 1)))
        drawn.append(int(logits[0, 0]))
    assert len(set(drawn)) > 1 and drawn[0] == drawn[-1]


def test_nearest_by_hand(monkeypatch):
    """Clients 1, 5 and 12 train. Novel 7 is nearest to 12, of those that answered; 8 to 1, whose
    models are not those of 12. Later 9 comes and alone is measured. When 12 leaves, 7 gets the
    nearest of the others; with nobody left to train, all get what was handed out last."""
    measured = []

    def distances(exchange, novel, training):
        measured.append([node.client for node in novel])
        far = {7: [np.nan, 0.3, 0.1], 8: [0.2, 0.5, 0.4], 9: [0.9, 0.5, 0.6]}
        columns = [(1, 5, 12).index(node.client) for node in training]
        return np.array([far[node.client] for node in novel])[:, columns]

    def exchange(action, payloads, config=None, like=None):
        return [update(n.client, {"w": np.full(1, n.client)}) for n in payloads]

    monkeypatch.setattr(pfl, "a_distances", distances)
    strategy = PFLNearest()
    strategy.exchange, strategy.exchange_together = exchange, at_once(exchange)
    arrays = strategy.initialize({"w": np.zeros(1), "head.bias": np.zeros(1)})
    training = [Node(i, 50 + i) for i in (1, 5, 12)]
    novel = [Node(i, 50 + i, novel=True) for i in (7, 8, 9)]
    strategy.nodes = training + novel

    def offered(nodes):
        sent = strategy.personalize(arrays, nodes)
        return {n.client: {k: a.item() for k, a in sent[n].items()} for n in nodes}

    assert offered(novel[:2]) == {7: {"12/w": 12}, 8: {"1/w": 1}}
    assert offered(novel) == {7: {"12/w": 12}, 8: {"1/w": 1}, 9: {"5/w": 5}}
    assert measured == [[7, 8], [9]]
    strategy.nodes = training[:2] + novel
    assert offered(novel[:2]) == {7: {"5/w": 5}, 8: {"1/w": 1}}
    strategy.nodes = novel
    assert offered(novel) == {7: {"5/w": 5}, 8: {"1/w": 1}, 9: {"5/w": 5}}


def test_the_nearest_of_equally_near_clients_is_drawn():
    """Clients 1, 5 and 12 at distances −0.2, NaN and −0.2: 1 or 12, by the seed and the novel
    client. At −0.3 it is 12, whose distance below 0 is the smaller one."""
    training = [Node(i, 50 + i) for i in (1, 5, 12)]
    novel = [Node(i, 50 + i, novel=True) for i in range(20, 60)]
    drawn = []
    for seed in (0, 0, 1):
        strategy = PFLNearest(seed=seed)
        row = np.array([-0.2, np.nan, -0.2])
        drawn.append([strategy._nearest_of(node, row, training).client for node in novel])
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {1, 12}
    assert 8 < drawn[0].count(1) < 32
    row = np.array([-0.2, 0.0, -0.3])
    assert {strategy._nearest_of(node, row, training).client for node in novel} == {12}


def offered_by_ensemble(seed, share):
    """The training clients whose models two novel clients get, of 3, 4, 10, 11 and 12."""
    strategy = PFLEnsemble(seed=seed, ensemble_share=share)
    strategy.exchange = lambda action, payloads, config=None, like=None: [
        update(n.client, {"w": np.full(1, n.client)}) for n in payloads
    ]
    strategy.nodes = [Node(i, 50 + i) for i in (3, 4, 10, 11, 12)]
    novel = [Node(i, 50 + i, novel=True) for i in (7, 8)]
    arrays = strategy.initialize({"w": np.zeros(1), "head.bias": np.zeros(1)})
    first, second = strategy.personalize(arrays, novel).values()
    assert first is second
    assert all(name == f"{a.item()}/w" for name, a in first.items())
    return [int(a.item()) for a in first.values()]


def test_a_share_of_the_ensemble():
    """0.4 of five are two, 0.01 is at least one; seeds draw other clients, a seed the same ones."""
    everyone = [3, 4, 10, 11, 12]
    assert offered_by_ensemble(0, 1.0) == everyone
    assert len(offered_by_ensemble(0, 0.01)) == 1
    halves = [offered_by_ensemble(seed, 0.4) for seed in range(8)]
    assert {len(half) for half in halves} == {2}
    assert set().union(*halves) == set(everyone)
    assert offered_by_ensemble(3, 0.4) == halves[3]


def test_the_base_is_in_the_same_round_at_the_same_rates():
    """½ in every 2 rounds; round 4 after three of a saved model's is six rounds on: ½³."""
    strategy = PFL(base="pfedhn", lr_decay=0.5, lr_decay_rounds=2, saved_rounds=3)
    strategy.now = Round(4)
    strategy.nodes = [Node(0, 50)]
    strategy.arrays = strategy.initialize({"w": np.zeros(1, np.float32)})
    strategy.broadcast(strategy.arrays, strategy.nodes)
    assert strategy.trainer.now is strategy.now
    assert strategy.trainer.nodes is strategy.nodes
    assert strategy.trainer.decay == strategy.decay == 0.125
