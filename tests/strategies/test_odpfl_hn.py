"""ODPFL-HN's three exchanges against the end-to-end gradient; its two phases; private clients."""

import json

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from small_runs import at_once, federate, share, states
from torch.func import functional_call
from torch.nn import functional as F

from clients.core.arrays import from_record, group, model_arrays, to_record
from clients.methods.odpfl_hn import DESCRIPTOR, ODPFLHNClient
from clients.models import build_model
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.node.bridge import answer
from fedapps.settings.config import defaults
from partitions.datasets.loading import Info
from strategies.core.replies import Node, Update
from strategies.core.round import Round
from strategies.methods.odpfl_hn import ODPFLHN
from strategies.methods.pfedhn import PFedHN

INFO = Info("tiny", (6,), 3, "")
ETA = 0.1


def data(client):
    rng = np.random.default_rng(client)
    return rng.random((8, 6), np.float32), rng.integers(0, 3, 8)


def model():
    """In float64; inputs come as float32 and are converted exactly."""
    torch.manual_seed(0)
    target = build_model("mlp-small", (6,), 3, 0)
    built = ODPFLHNClient.build_network(
        target, INFO, encoder="ds", descriptor_dim=4, num_clients=20, train_fraction=0.5
    ).double()
    for part in (built.target, built.encoder):
        part.register_forward_pre_hook(lambda _, x: (x[0].double(),))
    return built


def make_client(context, method):
    number = int(context.node_config["partition-id"])
    options = {"lr": ETA, "local_steps": 1, "batch_size": 8}  # one step on all samples
    return ODPFLHNClient(model(), share(*data(number)), client=number, **options)


def test_the_three_exchanges_are_one_step_on_the_end_to_end_gradient():
    """One local step gives w − w̃ = η ∇_w L, so φ and γ move by −lr·η·∇ mean_i L_i(f(g(x_i)))."""
    app = ClientApp()
    for register in (app.query(), app.train(), app.query("encode"), app.train("backprop")):
        register(lambda message, context: answer(message, context, make_client))
    settings = {"server_lr": 2.0, "encoder_lr": 3.0, "clip_norm": 0.0, "evaluate_every": 9}
    initial = to_record(model_arrays(model()))
    strategy, twin = (ODPFLHN(hidden_dim=7, **settings) for _ in range(2))
    grid = InProcessGrid.simulation(app, defaults(), 3)
    app.evaluate()(lambda message, context: answer(message, context, make_client))
    after = from_record(strategy.start(grid, initial, 1).arrays)

    twin.open(None, initial, {})
    phi, gamma = dict(twin.network().named_parameters()), twin.gamma
    net, loss = model(), 0.0
    for client in range(3):
        x, y = map(torch.from_numpy, data(client))
        e = functional_call(
            net.encoder, {n.removeprefix("encoder."): p for n, p in gamma.items()}, (x,)
        )
        w = {n.removeprefix("target."): t[0] for n, t in twin.network()(e[None]).items()}
        loss = loss + ETA * F.cross_entropy(functional_call(net.target, w, (x,)), y) / 3
    gradients = torch.autograd.grad(loss, [*phi.values(), *gamma.values()])
    named = [f"hypernetwork/{n}" for n in phi] + [f"encoder/{n}" for n in gamma]
    for name, p, g in zip(named, [*phi.values(), *gamma.values()], gradients, strict=True):
        step = (p.detach() - torch.from_numpy(after[name])) / (2.0 if name[0] == "h" else 3.0)
        error = (step - g).norm() / g.norm().clamp(min=1e-12)
        assert error < 1e-10 or (step - g).norm() < 1e-14, name


SETTINGS = {"method": "odpfl-hn", "num-clients": 6, "local-steps": 2, "evaluate-every": 1}


def go(**changes):
    """Run SETTINGS with `changes` in process; returns the result and the grid."""
    return federate(**SETTINGS | changes)


def test_two_phase_training_freezes_the_encoder_and_then_tunes_the_hypernetwork():
    """Of 3 rounds the last is the second phase: γ and the embeddings stay, φ moves."""

    def arrays(rounds, fine_tune):
        phases = {"odpfl-hn.training": "two-phase", "odpfl-hn.fine-tune-rounds": fine_tune}
        return from_record(go(rounds=rounds, **phases)[0].arrays)

    first, before, after = arrays(1, 0), arrays(2, 0), arrays(3, 1)
    assert len(group(before, "embedding")) == 3
    for name in before:
        same = np.array_equal(before[name], after[name])
        assert same == (not name.startswith("hypernetwork/")), name
    assert any((first[n] != before[n]).any() for n in first if n.startswith("encoder/"))


def test_two_phases_need_a_round_for_the_first():
    """But for a run that goes on from another one, whose encoder has learnt."""
    phases = {"odpfl-hn.training": "two-phase", "odpfl-hn.fine-tune-rounds": 2}
    with pytest.raises(ValueError, match="two-phase training of 2 rounds"):
        go(rounds=2, **phases)


def test_a_private_novel_client_is_asked_once():
    private = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}
    result, _ = go(rounds=3, **private)
    shown = [r for r, m in result.evaluate_metrics_clientapp.items() if "novel-accuracy" in m]
    assert shown == [3]


def test_a_private_novel_client_remembers_across_messages_what_it_answered(tmp_path):
    """Asked by message after the run: its γ again, and another one."""
    private = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}
    result, grid = go(rounds=1, **private, **{"output-dir": str(tmp_path)})
    gamma = {n: a for n, a in from_record(result.arrays).items() if n.startswith("encoder/")}
    gamma = {f"encoder.{n.partition('/')[2].removeprefix('encoder.')}": a for n, a in gamma.items()}
    novel = min(states(grid, "odpfl-hn"))

    def ask(arrays):
        content = RecordDict({"arrays": to_record(arrays)})
        (reply,) = grid.send_and_receive([Message(content, novel, "query.encode")])
        return reply

    before = states(grid, "odpfl-hn")[novel]
    answer = from_record(ask(gamma).content["arrays"])["descriptor"]
    assert any(np.array_equal(answer, array) for array in before.values())
    refused = ask({name: array + 1 for name, array in gamma.items()})
    assert "descriptor-answers 1 allow" in refused.error.reason
    got = json.loads((tmp_path / "summary.json").read_text())["privacy"]
    assert got["epsilon"] == 1.0
    assert "one input of a novel client" in got["terms"]


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="novel-rounds is 2, but a descriptor serves"):
        ODPFLHN(novel_rounds=2)
    with pytest.raises(ValueError, match="report-generalization-bound asks novel clients"):
        ODPFLHN(report_generalization_bound=True, descriptor_epsilon=1.0)


def strategy_of(**settings):
    """A server whose encoder is the one number γ = 1, of three rounds before the fifth and last."""
    strategy = ODPFLHN(**settings)
    one = np.ones(1, np.float32)
    strategy.initialize({"target.w": 0 * one, "encoder.out.bias": one})
    strategy.num_rounds = 5
    return strategy


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.0, 0.625), (1.0, 0.875)])
def test_the_encoder_descends_on_the_clients_mean_at_its_own_decayed_rate(clip_norm, expected):
    """Gradients 2 and 4, η_encoder = 0.5, halved every round: γ = 1 − 0.5·¼·3 in the third one;
    clipped at norm 1: 1 − 0.5·¼·1. The hypernetwork's rate is another one."""
    strategy = strategy_of(
        encoder_lr=0.5, server_lr=7.0, clip_norm=clip_norm, lr_decay=0.5, lr_decay_rounds=1
    )
    strategy.now = Round(3)
    nodes = [Node(i, 50 + i) for i in range(2)]
    for node in nodes:
        strategy.descriptors[node.client] = torch.zeros(1, requires_grad=True)
        strategy.descriptors[node.client].grad = torch.ones(1) * (node.client + 1)

    def exchange(action, payloads, like=None):
        assert [p[DESCRIPTOR].item() for p in payloads.values()] == [1.0, 2.0]  # g_e, each its own
        return [
            Update(node, {"encoder.out.bias": np.float32([2 + 2 * node.client])}, node.id, {})
            for node in payloads
        ]

    strategy.exchange = exchange
    strategy._descend_on_encoder(nodes)
    assert strategy.gamma["encoder.out.bias"].item() == pytest.approx(expected)


def test_the_last_rounds_alone_fine_tune(monkeypatch):
    """Two of five: embeddings are free in rounds 1 to 3, phase 0; rounds 4 and 5 are phase 1, of
    which the best round is chosen anew. End-to-end training has one phase. Nothing stops while
    embeddings are free."""
    monkeypatch.setattr(PFedHN, "broadcast", lambda *_: {})
    for training, expected in (
        ("two-phase", [(True, 0, False)] * 3 + [(False, 1, True)] * 2),
        ("end-to-end", [(False, 0, True)] * 5),
    ):
        strategy, found = strategy_of(training=training, fine_tune_rounds=2), []
        for number in range(1, 6):
            strategy.now = Round(number)
            strategy.broadcast({}, [])
            found.append((strategy.free, strategy.selection_phase, strategy.may_stop))
        assert found == expected


def test_with_private_novel_clients_the_last_round_is_reported():
    assert strategy_of(descriptor_epsilon=1.0).report_last_round
    assert not strategy_of().report_last_round


def test_with_free_embeddings_the_encoder_is_the_mean_of_the_clients(monkeypatch):
    """Fitted encoders 2 and 6, of 1 and 9 samples: 4."""
    monkeypatch.setattr(PFedHN, "aggregate", lambda *_: {})
    strategy = strategy_of(training="two-phase", fine_tune_rounds=2)
    strategy.now = Round(1)
    fitted = [(Node(0, 50), 2.0, 1), (Node(1, 51), 6.0, 9)]
    strategy.aggregate(
        {}, [Update(node, {"encoder.out.bias": np.float32([v])}, n, {}) for node, v, n in fitted]
    )
    assert strategy.gamma["encoder.out.bias"].item() == 4.0


def test_the_largest_noise_is_reported():
    """Novel clients of 40, 20 and 30 samples sent σ 0.1, 0.4 and 0.2: the largest is reported."""
    strategy = strategy_of(descriptor_epsilon=2.0)
    strategy.sigmas = [0.1, 0.4, 0.2]
    assert strategy.report()["dp-sigma"] == 0.4
    assert strategy.report()["dp-epsilon"] == 2.0


def test_each_rounds_statistics_are_of_the_training_clients_that_answered_in_it():
    """Rate ½. Round 1: clients 0 and 1 take part and send 1 and 5, and 2, asked only for the
    first statistics, 3: mean 3, variance 8/3. Evaluation, where a novel one tells 100, changes
    nothing. Round 2: 0 tells 7, 1 is silent: it gets no model, and its former descriptor counts
    no more; mean 3 + ½(7 − 3) = 5, variance ½(8/3 + ½·16) = 16/3."""
    strategy = strategy_of(descriptor_rate=0.5, hidden_dim=2)
    nodes = [Node(i, 50 + i) for i in range(3)] + [Node(9, 59, novel=True)]
    strategy.nodes, asked, got = nodes, [], {}

    def exchange(action, payloads, config, like):
        if payloads:
            asked.append((action, [node.client for node in payloads]))
        found = {node: got[node.client] for node in payloads if node.client in got}
        return [Update(node, {DESCRIPTOR: np.float32([e])}, 1, {}) for node, e in found.items()]

    def moments():
        return strategy.moments.mean.item(), strategy.moments.variance.item()

    strategy.exchanges = at_once(exchange)
    got |= {0: 1.0, 1: 5.0, 2: 3.0, 9: 100.0}
    assert strategy.broadcast({}, nodes[:2]).keys() == set(nodes[:2])
    assert moments() == (3.0, pytest.approx(8 / 3))
    assert strategy.personalize({}, nodes).keys() == set(nodes)
    assert moments() == (3.0, pytest.approx(8 / 3))
    got.clear()
    got[0] = 7.0
    assert strategy.broadcast({}, nodes[:2]).keys() == {nodes[0]}
    assert moments() == (5.0, pytest.approx(16 / 3))
    assert asked == [("query.encode", who) for who in ([0, 1], [2], [0, 1, 2, 9], [0, 1])]
