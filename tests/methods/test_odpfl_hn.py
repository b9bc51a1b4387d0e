"""ODPFL-HN: encoding in two passes and privacy of a novel client; on the server the three
exchanges against the end-to-end gradient, and its two phases."""

import itertools
import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from scipy.stats import chi2, norm
from small_runs import at_once, fedapps, federate, share, states
from torch.func import functional_call
from torch.nn import functional as F

from clients.core.arrays import from_record, group, model_arrays, to_numpy, to_record
from clients.methods.odpfl_hn import DESCRIPTOR, ODPFLHNClient, noise_scale
from clients.models import build_model
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.node.bridge import reply_of
from fedapps.settings.config import defaults
from partitions.datasets.loading import Info
from partitions.shares import Samples, Share
from strategies.core.replies import Node, Update
from strategies.core.round_state import Round
from strategies.methods.odpfl_hn import ODPFLHN

INFO = Info("tiny", (6,), 3, "")
DIM = 4


def make_share(n=9, novel=False):
    generator = torch.Generator().manual_seed(1)
    samples = Samples(
        torch.rand(n, 6, generator=generator),
        torch.randint(3, (n,), generator=generator),
        torch.arange(n),
        scale=1.0,
    )
    return Share(samples, samples, None, samples, novel)


SIZES = {"num_clients": 20, "train_fraction": 0.5}


def client(encoder="ds", novel=False, double=False, n=9, **options):
    torch.manual_seed(0)
    target = build_model("mlp-small", (6,), 3, 0)
    model = ODPFLHNClient.build_network(target, INFO, encoder=encoder, descriptor_dim=DIM, **SIZES)
    if double:
        model.double()
        model.encoder.register_forward_pre_hook(lambda _, x: (x[0].double(),))
    return ODPFLHNClient(model, make_share(n, novel), client=3, **options)


def gamma(of):
    return to_numpy(dict(of.model.encoder.named_parameters(prefix="encoder")))


@pytest.mark.parametrize("options", [{}, {"encode_samples": 5}, {"encode_batch_size": 4}])
@pytest.mark.parametrize("encoder", ["ds", "dss", "st", "ds-sphere"])
def test_backprop_is_the_gradient_of_this_rounds_encoding(encoder, options):
    """⟨g_γ, d⟩ against central differences of ⟨g_e, encode(γ + t d)⟩, for a random direction d.

    That also shows that both passes see the same inputs, where a random part of them is used."""
    one = client(encoder, double=True, **options)
    rng = np.random.default_rng(0)
    now, g_e, config = gamma(one), rng.normal(size=DIM), {"server-round": 7}
    g_gamma, _ = one.backprop(now | {DESCRIPTOR: g_e}, config)
    direction = {name: rng.normal(size=a.shape) for name, a in now.items()}

    def at(t):
        moved = {name: a + t * direction[name] for name, a in now.items()}
        return float(g_e @ one.encode(moved, config)[0][DESCRIPTOR])

    slope = (at(1e-8) - at(-1e-8)) / 2e-8
    assert sum((g_gamma[n] * direction[n]).sum() for n in now) == pytest.approx(slope, rel=1e-5)


def test_batched_encoding_of_a_mean_equals_the_encoding_in_one_pass():
    """Ten inputs in batches of 4, 3 and 3, which weigh by their sizes."""
    whole, batched = (client("ds-sphere", double=True, n=10, encode_batch_size=b) for b in (0, 4))
    e, b = (c.encode(gamma(c), {"server-round": 1})[0][DESCRIPTOR] for c in (whole, batched))
    np.testing.assert_allclose(b, e, rtol=1e-12)


def test_training_leaves_the_encoder_alone_and_replies_with_the_target_alone():
    one = client()
    sent = {n: a for n, a in one.initial.items() if n.startswith("target.")}
    reply, n, _ = one.train(sent, {"server-round": 1})
    assert reply.keys() == sent.keys()
    assert n == 9
    assert any((reply[name] != sent[name]).any() for name in sent)
    for name, array in gamma(one).items():
        np.testing.assert_array_equal(array, one.initial[name])


@pytest.mark.parametrize(("options", "norm"), [({}, 1.0), ({"encoder_local_clip_norm": 0.4}, 0.4)])
def test_the_encoder_is_fitted_by_clipped_steps_on_the_squared_distance(options, norm):
    """‖g − e‖² before the first step is reported; that step's gradient, of a norm above 1, is
    clipped to 1 by default, so that lr 0.25 moves γ by 0.25 in norm."""
    one = client(encoder_steps=1, encoder_local_lr=0.25, **options)
    far = np.array([3.0, -2.0, 5.0, 0.0], np.float32)
    e = one.encode(gamma(one), {})[0][DESCRIPTOR]
    before = gamma(one)
    reply, _, metrics = one.train(one.initial | {DESCRIPTOR: far}, {})
    assert metrics["encoder-loss"] == pytest.approx(np.square(e - far).sum(), rel=1e-5)
    moved = sum(np.square(reply[n] - before[n]).sum() for n in before) ** 0.5
    assert moved == pytest.approx(0.25 * norm, rel=1e-3)


def test_a_training_client_describes_what_it_trains_on_and_a_novel_one_all_it_has():
    """In every round anew, where a part of the inputs is used."""
    got = {}
    for novel in (False, True):
        one = client("ds-sphere", novel=novel)
        every = one.share.everything
        one.share = replace(one.share, train=replace(every, index=every.index[:4]))
        got[novel] = one.encode(gamma(one), {})[0][DESCRIPTOR]
        one.encode_samples = 2
        e = [one.encode(gamma(one), {"server-round": r})[0][DESCRIPTOR] for r in (1, 1, 2)]
        assert (e[0] == e[1]).all() and (e[0] != e[2]).any()
        x = every[slice(None) if novel else slice(4)][0]
        with torch.no_grad():
            expected = one.encoder(x).numpy()
        assert got[novel] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_noise_is_that_of_the_inputs_that_were_described():
    """Five of nine: Δ = 2√d/5; and by hand at ε = ½, δ = 0.01: s = Δ·√(2 ln 125)/½."""
    one = client("ds-sphere", novel=True, descriptor_epsilon=0.5, encode_samples=5)
    sigma = one.encode(gamma(one), {})[1]["dp-sigma"]
    assert sigma == pytest.approx(2 * 2 / 5 * math.sqrt(2 * math.log(125)) / 0.5)


@pytest.mark.parametrize(("clients", "fraction", "dim"), [(30, 0.9, 7), (20, 0.5, 3), (8, 0.5, 1)])
def test_a_descriptor_has_a_quarter_of_the_training_clients_entries_rounded_up(
    clients, fraction, dim
):
    """⌈27/4⌉, ⌈10/4⌉, ⌈4/4⌉."""
    target = build_model("mlp-small", (6,), 3, 0)
    model = ODPFLHNClient.build_network(target, INFO, num_clients=clients, train_fraction=fraction)
    assert model.encoder.out.out_features == dim


def test_labels_play_no_part_in_the_descriptor():
    one, other = client(novel=True), client(novel=True)
    other.share.everything.y.fill_(0)
    np.testing.assert_array_equal(
        one.encode(gamma(one), {})[0][DESCRIPTOR], other.encode(gamma(other), {})[0][DESCRIPTOR]
    )


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 0.99])
def test_small_epsilon_is_the_classic_mechanism(epsilon):
    """s² = 2 Δ² ln(1.25/δ)/ε², with Δ = 0.5, δ = 0.01: s = 0.5·√(2·4.828314)/ε."""
    assert noise_scale(0.5, epsilon, 0.01) == pytest.approx(0.5 * 3.107512 / epsilon, rel=1e-6)


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 10.0])
def test_large_epsilon_is_the_analytic_mechanism(epsilon):
    """δ = Φ(Δ/2s − εs/Δ) − e^ε Φ(−Δ/2s − εs/Δ), Balle and Wang, Theorem 8."""
    delta, ratio = 0.01, noise_scale(0.5, epsilon, 0.01) / 0.5
    found = norm.cdf(1 / (2 * ratio) - epsilon * ratio) - math.exp(epsilon) * norm.cdf(
        -1 / (2 * ratio) - epsilon * ratio
    )
    assert found == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_the_noise_has_the_scale_that_is_reported(epsilon):
    """Σ (noise/σ)² over 4 · 600 entries is χ² distributed; a two-sided test at 1e-6."""
    plain = client("ds-sphere", novel=True)
    private = client("ds-sphere", novel=True, descriptor_epsilon=epsilon, dp_generator="seeded")
    exact = plain.encode(gamma(plain), {})[0][DESCRIPTOR]
    replies = []
    for r in range(600):  # as many clients, each asked once
        private.state = {}
        replies.append(private.encode(gamma(private), {"server-round": r}))
    sigma = replies[0][1]["dp-sigma"]
    assert sigma == noise_scale(2 * DIM**0.5 / 9, epsilon, 0.01)
    noise = np.array([e[DESCRIPTOR] - exact for e, _ in replies], np.float64) / sigma
    low, high = chi2.ppf([5e-7, 1 - 5e-7], noise.size)
    assert low < np.square(noise).sum() < high
    assert abs(noise.mean()) < 5 / math.sqrt(noise.size)


def test_the_systems_noise_does_not_repeat_and_seeded_noise_does():
    def draws(kind):
        twins = [client("ds-sphere", novel=True, descriptor_epsilon=1.0, dp_generator=kind)] * 2
        got = []
        for one in twins:
            one.state = {}
            got.append(one.encode(gamma(one), {"server-round": 1})[0][DESCRIPTOR])
        return got

    assert (draws("system")[0] != draws("system")[1]).any()
    np.testing.assert_array_equal(*draws("seeded"))


def test_seeded_noise_is_each_clients_and_each_rounds_own():
    """The same inputs, in another order: without noise their descriptors are the same but for
    rounding."""
    answers = []
    for number, round_ in ((3, 1), (4, 1), (3, 2)):
        one = client("ds-sphere", novel=True, descriptor_epsilon=1.0, dp_generator="seeded")
        one.client = number
        answers.append(one.encode(gamma(one), {"server-round": round_})[0][DESCRIPTOR])
    assert all(np.abs(a - b).max() > 0.01 for a, b in itertools.combinations(answers, 2))


def scaled(factor):
    return {name: factor * array for name, array in gamma(client("ds-sphere")).items()}


def test_a_private_client_answers_one_encoder_and_always_alike():
    """Also in another round, on other rows, and as another object that found the state."""
    one = client("ds-sphere", novel=True, descriptor_epsilon=1.0, encode_samples=5)
    answers = [one.encode(gamma(one), {"server-round": r})[0][DESCRIPTOR] for r in (1, 2)]
    np.testing.assert_array_equal(*answers)
    later = client("ds-sphere", novel=True, descriptor_epsilon=1.0)
    later.state = one.state
    with pytest.raises(ValueError, match="has answered what descriptor-epsilon 1 and"):
        later.encode(scaled(2), {})
    np.testing.assert_array_equal(later.encode(gamma(one), {})[0][DESCRIPTOR], answers[0])
    later.share.everything.x[0] += 1  # an old answer would describe other data
    with pytest.raises(ValueError, match="or its data have changed"):
        later.encode(gamma(one), {})


def test_several_answers_share_one_budget():
    """Four answers at ε = 0.5, so Σ (Δ/σ)² is that of one: σ is doubled, √4. The fifth is refused,
    and so is any after the budget has been lowered."""
    options = {"novel": True, "descriptor_epsilon": 0.5}
    one = client("ds-sphere", **options, descriptor_answers=4)
    got = [one.encode(scaled(1 + k), {})[1]["dp-sigma"] for k in range(4)]
    assert got == pytest.approx([2 * noise_scale(2 * DIM**0.5 / 9, 0.5, 0.01)] * 4)
    assert one.encode(scaled(3), {})[1]["dp-sigma"] == got[2]
    with pytest.raises(ValueError, match="descriptor-answers 4 allow"):
        one.encode(scaled(9), {})
    lower = client("ds-sphere", **options | {"descriptor_epsilon": 0.4}, descriptor_answers=9)
    lower.state = one.state
    with pytest.raises(ValueError, match=r"descriptor-epsilon 0\.4"):
        lower.encode(scaled(9), {})


def test_training_clients_add_no_noise():
    plain, one = (client("ds-sphere", descriptor_epsilon=e) for e in (0.0, 0.1))
    np.testing.assert_array_equal(
        one.encode(gamma(one), {})[0][DESCRIPTOR], plain.encode(gamma(plain), {})[0][DESCRIPTOR]
    )


def test_a_private_novel_client_answers_nothing_that_its_budget_does_not_cover():
    """Whatever the server asks; a training client of the same run answers as always."""
    asked = ("train", "backprop", "domain")
    for novel in (True, False):
        one = client("ds-sphere", novel=novel, descriptor_epsilon=0.5)
        arrays = one.initial
        sent = {
            "train": {n: a for n, a in arrays.items() if n.startswith("target.")},
            "backprop": gamma(one) | {DESCRIPTOR: np.ones(DIM, np.float32)},
            "domain": {"weights": np.zeros((1, 7), np.float32)},
        }
        for action in asked:
            answer = partial(getattr(one, action), sent[action], {"side": 1.0})
            if novel:
                with pytest.raises(ValueError, match=r"descriptor-epsilon is 0\.5, and covers no"):
                    answer()
            else:
                answer()
        assert one.encode(gamma(one), {})[0].keys() == {DESCRIPTOR}


def test_an_epsilon_whose_noise_is_infinite_is_refused():
    with pytest.raises(ValueError, match="descriptor-epsilon is 1e-200, whose noise"):
        client("ds-sphere", novel=True, descriptor_epsilon=1e-200)


@pytest.mark.parametrize("encoder", ["ds", "dss", "st"])
def test_an_unbounded_encoder_is_refused(encoder):
    with pytest.raises(ValueError, match="no bounded sensitivity"):
        client(encoder, novel=True, descriptor_epsilon=1.0)


ETA = 0.1


def client_data(client):
    rng = np.random.default_rng(client)
    return rng.random((8, 6), np.float32), rng.integers(0, 3, 8)


def client_model():
    """In float64; inputs come as float32 and are converted exactly."""
    torch.manual_seed(0)
    target = build_model("mlp-small", (6,), 3, 0)
    built = ODPFLHNClient.build_network(
        target, INFO, encoder="ds", descriptor_dim=4, num_clients=20, train_fraction=0.5
    ).double()
    for part in (built.target, built.encoder):
        part.register_forward_pre_hook(lambda _, x: (x[0].double(),))
    return built


def federated_client(context):
    number = int(context.node_config["partition-id"])
    options = {"lr": ETA, "local_steps": 1, "batch_size": 8}  # one step on all samples
    return ODPFLHNClient(client_model(), share(*client_data(number)), client=number, **options)


def test_the_three_exchanges_are_one_step_on_the_end_to_end_gradient():
    """One local step gives w − w̃ = η ∇_w L, so φ and γ move by −lr·η·∇ mean_i L_i(f(g(x_i)))."""
    app = ClientApp()
    for register in (app.query(), app.train(), app.query("encode"), app.train("backprop")):
        register(lambda message, context: reply_of(federated_client(context), message, context))
    settings = {"server_lr": 2.0, "encoder_lr": 3.0, "clip_norm": 0.0, "evaluate_every": 9}
    initial = to_record(model_arrays(client_model()))
    strategy, twin = (ODPFLHN(hidden_dim=7, **settings) for _ in range(2))
    grid = InProcessGrid.simulation(app, defaults(), 3)
    app.evaluate()(lambda message, context: reply_of(federated_client(context), message, context))
    after = from_record(strategy.start(grid, initial, 1).arrays)

    twin.open(None, initial, {})
    phi, gamma = dict(twin.generator.network().named_parameters()), twin.gamma
    net, loss = client_model(), 0.0
    for client in range(3):
        x, y = map(torch.from_numpy, client_data(client))
        e = functional_call(
            net.encoder, {n.removeprefix("encoder."): p for n, p in gamma.items()}, (x,)
        )
        w = {n.removeprefix("target."): t[0] for n, t in twin.generator.network()(e[None]).items()}
        loss = loss + ETA * F.cross_entropy(functional_call(net.target, w, (x,)), y) / 3
    gradients = torch.autograd.grad(loss, [*phi.values(), *gamma.values()])
    named = [f"hypernetwork/{n}" for n in phi] + [f"encoder/{n}" for n in gamma]
    for name, p, g in zip(named, [*phi.values(), *gamma.values()], gradients, strict=True):
        step = (p.detach() - torch.from_numpy(after[name])) / (2.0 if name[0] == "h" else 3.0)
        error = (step - g).norm() / g.norm().clamp(min=1e-12)
        assert error < 1e-10 or (step - g).norm() < 1e-14, name


SETTINGS = {"method": "odpfl-hn", "num-clients": 6, "local-steps": 2, "evaluate-every": 1}


def run_small(**changes):
    """Run SETTINGS with `changes` in process; returns the result and the grid."""
    return federate(**SETTINGS | changes)


def test_two_phase_training_freezes_the_encoder_and_then_tunes_the_hypernetwork():
    """Of 3 rounds the last is the second phase: γ and the embeddings stay, φ moves."""

    def arrays(rounds, fine_tune):
        phases = {"odpfl-hn.training": "two-phase", "odpfl-hn.fine-tune-rounds": fine_tune}
        return from_record(run_small(rounds=rounds, **phases)[0].arrays)

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
        run_small(rounds=2, **phases)
    words = ("run", "--methods", "odpfl-hn training=two-phase fine-tune-rounds=2", "rounds=2")
    refused = fedapps(*words, "--dry-run", code=2)
    assert "two-phase training of 2 rounds with 2 fine-tune-rounds" in refused


def test_a_private_novel_client_is_asked_once():
    private = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}
    result, _ = run_small(rounds=3, **private)
    shown = [r for r, m in result.evaluate_metrics_clientapp.items() if "novel-accuracy" in m]
    assert shown == [3]


def test_a_private_novel_client_remembers_across_messages_what_it_answered(tmp_path):
    """Asked by message after the run: its γ again, and another one."""
    private = {"odpfl-hn.encoder": "ds-sphere", "odpfl-hn.descriptor-epsilon": 1.0}
    result, grid = run_small(rounds=1, **private, **{"output-dir": str(tmp_path)})
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
        strategy.descriptors[node] = torch.zeros(1, requires_grad=True)
        strategy.descriptors[node].grad = torch.ones(1) * (node.client + 1)

    def exchange(action, payloads, like=None):
        assert [p[DESCRIPTOR].item() for p in payloads.values()] == [1.0, 2.0]  # g_e, each its own
        return [
            Update(node, {"encoder.out.bias": np.float32([2 + 2 * node.client])}, node.id, {})
            for node in payloads
        ]

    strategy.exchange = exchange
    strategy._descend_on_encoder(nodes)
    assert strategy.gamma["encoder.out.bias"].item() == pytest.approx(expected)


def test_the_last_rounds_alone_fine_tune():
    """Two of five: embeddings are free in rounds 1 to 3, phase 0; rounds 4 and 5 are phase 1, of
    which the best round is chosen anew. End-to-end training has one phase. Nothing stops while
    embeddings are free."""
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


def test_with_free_embeddings_the_encoder_is_the_mean_of_the_clients():
    """Fitted encoders 2 and 6, of 1 and 9 samples: 4."""
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

    strategy.exchange_together = at_once(exchange)
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


def test_a_checkpoint_names_its_arrays_as_ever():
    """What saved runs hold: φ, γ, free embeddings and statistics by these names, the noise, and
    the optimizers of φ and γ in this order, the first with the embeddings as a further group."""
    strategy = strategy_of(training="two-phase", fine_tune_rounds=2, hidden_dim=2)
    strategy.now = Round(1)
    strategy.moments.update(torch.tensor([[1.0], [3.0]]))
    strategy.broadcast({}, [Node(4, 54)])
    strategy.arrays = strategy.server_arrays()
    state = strategy.state()
    groups = {name.partition("/")[0] for name in state["arrays"]}
    assert groups == {"hypernetwork", "encoder", "embedding", "moments"}
    singles = {name for name in state["arrays"] if not name.startswith("hypernetwork/")}
    assert singles == {
        "encoder/encoder.out.bias",
        "embedding/4",
        "moments/mean",
        "moments/variance",
    }
    assert list(state["kept"]) == ["sigmas"]
    assert len(state["optimizers"]) == 2
