"""pFedHN: its update against the gradient of its surrogate, computed by brute force; sizes, fixed
descriptors, novel labeled clients, joins and leaves, saved models."""

import math
from copy import deepcopy
from dataclasses import replace

import networks_with_parts
import numpy as np
import pytest
import torch
from small_runs import SMALL, federate, share, states
from torch import nn

from clients.core.arrays import from_record, group, model_arrays, to_record
from clients.core.evaluation import score_samples
from clients.methods.pfedhn import PFedHNClient, PFedHNPCClient
from clients.models import build_model
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from strategies.core.replies import Node, Update
from strategies.core.round_state import Round
from strategies.methods._generated_networks import Targets
from strategies.methods.pfedhn import PFedHN

TEMPLATE = {"w": np.zeros((2, 3)), "b": np.zeros(2)}  # float64


def surrogate(strategy, nodes, trained):
    """Σ_i ½‖θ̃_i − h(v_i; φ)‖², the trained weights held fixed."""
    generator = strategy.generator
    theta = generator.generate([generator.embeddings[node.client] for node in nodes])
    return sum(
        0.5 * (torch.from_numpy(reply[name]) - theta[name][i]).square().sum()
        for i, reply in enumerate(trained)
        for name in reply
    )


def test_the_update_descends_on_the_surrogate():
    """With plain SGD the step of φ is −lr·mean_i, that of v_i is −lr_v times its own gradient of
    the surrogate; here these gradients come from autograd on the surrogate itself."""
    torch.set_default_dtype(torch.float64)
    try:
        strategy = PFedHN(
            embedding_dim=3, hidden_dim=5, hidden_layers=2, server_lr=0.1, embedding_lr=0.2,
            server_momentum=0.0, server_weight_decay=0.0, clip_norm=0.0,
        )  # fmt: skip
        strategy.open(None, to_record(TEMPLATE), {})
        nodes = [Node(0, 10), Node(1, 11), Node(2, 12)]
        sent = strategy.broadcast({}, nodes)
        rng = np.random.default_rng(0)
        trained = [
            {n: a + rng.normal(size=a.shape) for n, a in sent[node].items()} for node in nodes
        ]
        phi = dict(strategy.generator.hypernetwork.named_parameters())
        v = strategy.generator.embeddings
        loss = surrogate(strategy, nodes, trained)
        gradients = torch.autograd.grad(loss, [*phi.values(), *v.values()])
        steps = [0.1 / 3] * len(phi) + [0.2] * len(v)
        expected = [
            (p - step * g).detach().clone()
            for p, g, step in zip([*phi.values(), *v.values()], gradients, steps, strict=True)
        ]
        strategy.aggregate({}, [Update(n, t, 1, {}) for n, t in zip(nodes, trained, strict=True)])
        for after, want in zip([*phi.values(), *v.values()], expected, strict=True):
            torch.testing.assert_close(after.detach(), want, rtol=1e-10, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_client_without_a_reply_leaves_its_embedding_alone():
    strategy = PFedHN(embedding_dim=2, hidden_dim=4, hidden_layers=1)
    strategy.open(None, to_record({n: a.astype(np.float32) for n, a in TEMPLATE.items()}), {})
    nodes = [Node(0, 10), Node(1, 11)]
    sent = strategy.broadcast({}, nodes)
    before = {client: v.detach().clone() for client, v in strategy.generator.embeddings.items()}
    reply = {n: a + 1 for n, a in sent[nodes[1]].items()}
    strategy.aggregate({}, [Update(nodes[1], reply, 1, {})])
    assert torch.equal(strategy.generator.embeddings[0], before[0])
    assert not torch.equal(strategy.generator.embeddings[1], before[1])


def optimized_by_hand(network, rows, goals, order, optimizer, **settings):
    """The embedding table (clients, dim) after one step of torch's optimizer for each client of
    `order`: as the authors' code, one optimizer over the hypernetwork and the whole table."""
    table = nn.Embedding.from_pretrained(rows.clone(), freeze=False)
    parameters = [*network.parameters(), *table.parameters()]
    optimizer = optimizer(parameters, **settings)
    for client, goal in zip(order, goals, strict=True):
        theta = network(table(torch.tensor([client])))["w"]
        difference = theta.detach() - torch.from_numpy(goal)
        optimizer.zero_grad()
        theta.backward(difference)
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    return table.weight.detach()


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [("sgd", torch.optim.SGD, {"momentum": 0.9}), ("adam", torch.optim.Adam, {})],
)
def test_momentum_and_decay_move_the_embeddings_of_all_clients(name, kind, options):
    """Two of three clients are sampled by turns for 20 steps. The third is never sampled: weight
    decay alone moves it."""
    torch.set_default_dtype(torch.float64)
    try:
        strategy = PFedHN(
            embedding_dim=3, hidden_dim=5, hidden_layers=2, server_lr=0.1, server_momentum=0.9,
            server_weight_decay=0.01, server_optimizer=name, clip_norm=0.5,
            moved_embeddings="all",
        )  # fmt: skip
        strategy.open(None, to_record({"w": TEMPLATE["w"]}), {})
        strategy.nodes = [Node(i, 10 + i) for i in range(3)]
        network = deepcopy(strategy.generator.network())
        strategy.broadcast({}, strategy.nodes[:1])
        embeddings = strategy.generator.embeddings
        rows = torch.stack([embeddings[i].detach().clone() for i in range(3)])
        order = [0, 1] * 10
        goals = np.random.default_rng(0).normal(size=(20, 2, 3))
        for client, goal in zip(order, goals, strict=True):
            node = strategy.nodes[client]
            strategy.broadcast({}, [node])
            strategy.aggregate({}, [Update(node, {"w": goal}, 1, {})])
        expected = optimized_by_hand(
            network, rows, goals, order, kind, lr=0.1, weight_decay=0.01, **options
        )
        for client in range(3):
            torch.testing.assert_close(
                embeddings[client].detach(), expected[client], rtol=0, atol=1e-10
            )
        assert (expected[2] - rows[2]).abs().min() > 1e-4
    finally:
        torch.set_default_dtype(torch.float32)


def test_embeddings_rest_between_their_rounds_by_default():
    """θ = W v, W = 2, v = 3 and 1, rate 0.1, momentum ½, no decay, and W is held. Client 0 replies
    θ̃ = 5: g = 2·(6 − 5), v = 2.8. In the second round client 1 replies its own θ = 2, so its
    gradient is 0. Client 0 stays at 2.8, and with "all" goes on by half its step, to 2.7."""
    for moved, expected in (("sampled", 2.8), ("all", 2.7)):
        strategy = PFedHN(
            embedding_dim=1, hidden_layers=0, bias=False, server_lr=0.0, embedding_lr=0.1,
            server_momentum=0.5, server_weight_decay=0.0, clip_norm=0.0, moved_embeddings=moved,
        )  # fmt: skip
        strategy.open(None, to_record({"w": np.zeros(1, np.float32)}), {})
        strategy.nodes = [Node(i, 50 + i) for i in range(2)]
        strategy.ensure_embeddings(strategy.nodes)
        (weight,) = strategy.generator.network().parameters()
        with torch.no_grad():
            weight.fill_(2.0)
            strategy.generator.embeddings[0].fill_(3.0)
            strategy.generator.embeddings[1].fill_(1.0)
        for node, goal in zip(strategy.nodes, (5, 2), strict=True):
            strategy.broadcast({}, [node])
            strategy.aggregate({}, [Update(node, {"w": np.full(1, goal, np.float32)}, 1, {})])
        assert strategy.generator.embeddings[0].item() == pytest.approx(expected)
        assert strategy.generator.embeddings[1].item() == 1.0


def test_novel_clients_rest_while_others_train():
    """A novel client's embedding, drawn by an evaluation, does not move with "all"."""
    strategy = PFedHN(embedding_dim=2, hidden_dim=4, hidden_layers=1, moved_embeddings="all")
    strategy.open(None, to_record({"w": np.zeros(2, np.float32)}), {})
    strategy.nodes = [Node(0, 50), Node(1, 51), Node(2, 52, novel=True)]
    strategy.ensure_embeddings(strategy.nodes)
    before = {i: v.detach().clone() for i, v in strategy.generator.embeddings.items()}
    strategy.broadcast({}, strategy.nodes[:1])
    strategy.aggregate({}, [Update(strategy.nodes[0], {"w": np.ones(2, np.float32)}, 1, {})])
    stays = {i: torch.equal(v, before[i]) for i, v in strategy.generator.embeddings.items()}
    assert stays == {0: False, 1: False, 2: True}


def test_a_linear_step_by_hand():
    """θ = W v = 2·3, θ̃ = 5: g_W = 3·(6 − 5), g_v = 2·(6 − 5), together of norm √13, clipped at 1.
    Rates 0.4 and 0.8 at a quarter in the third round: W = 2 − 0.1·3/√13, v = 3 − 0.2·2/√13."""
    strategy = PFedHN(
        embedding_dim=1, hidden_layers=0, bias=False, server_lr=0.4, embedding_lr=0.8,
        server_momentum=0.0, server_weight_decay=0.0, clip_norm=1.0, lr_decay=0.5,
        lr_decay_rounds=1,
    )  # fmt: skip
    strategy.open(None, to_record({"w": np.zeros(1, np.float32)}), {})
    strategy.now, node = Round(3), Node(0, 50)
    strategy.ensure_embeddings([node])
    (weight,) = strategy.generator.network().parameters()
    with torch.no_grad():
        weight.fill_(2.0)
        strategy.generator.embeddings[0].fill_(3.0)
    assert strategy.broadcast({}, [node])[node]["w"].tolist() == [6.0]
    strategy.aggregate({}, [Update(node, {"w": np.full(1, 5, np.float32)}, 1, {})])
    assert weight.item() == pytest.approx(2 - 0.1 * 3 / 13**0.5, rel=1e-5)
    assert strategy.generator.embeddings[0].item() == pytest.approx(3 - 0.2 * 2 / 13**0.5, rel=1e-5)


def test_the_mean_is_over_those_who_replied_and_clipped_after_it():
    """θ = W v, W = 2, v = 3, 1, 5; θ̃ = 5 and 4 of the first two: θ − θ̃ = 1 and −2. g_W is
    (3·1 − 1·2)/2 = ½, g_v 2 and −4, together of norm 4.5, clipped at 0.9: a fifth of them. Rates
    0.1 and 0.2; the third client, who did not reply, keeps its v."""
    strategy = PFedHN(
        embedding_dim=1, hidden_layers=0, bias=False, server_lr=0.1, embedding_lr=0.2,
        server_momentum=0.0, server_weight_decay=0.0, clip_norm=0.9,
    )  # fmt: skip
    strategy.open(None, to_record({"w": np.zeros(1, np.float32)}), {})
    nodes = [Node(i, 50 + i) for i in range(3)]
    strategy.ensure_embeddings(nodes)
    (weight,) = strategy.generator.network().parameters()
    with torch.no_grad():
        weight.fill_(2.0)
        for i, v in enumerate((3.0, 1.0, 5.0)):
            strategy.generator.embeddings[i].fill_(v)
    strategy.broadcast({}, nodes)
    replies = [(nodes[0], 5, 9), (nodes[1], 4, 1)]  # sample counts do not count
    strategy.aggregate({}, [Update(n, {"w": np.full(1, w, "f")}, m, {}) for n, w, m in replies])
    assert weight.item() == pytest.approx(2 - 0.1 * 0.5 / 5)
    found = [strategy.generator.embeddings[i].item() for i in range(3)]
    assert found == pytest.approx([3 - 0.2 * 2 / 5, 1 + 0.2 * 4 / 5, 5])


def test_every_client_starts_from_an_embedding_of_its_own():
    """Of 1 + ⌊8 / 4⌋ entries with eight training clients, however many novel ones there are; the
    draws do not depend on the order in which clients are met."""
    found = []
    for order in (1, -1):
        strategy = PFedHN(hidden_layers=1, hidden_dim=2)
        strategy.open(None, to_record({"w": np.zeros(1, np.float32)}), {})
        strategy.nodes = [Node(i, 50 + i, novel=i >= 8) for i in range(12)]
        strategy.ensure_embeddings(strategy.nodes[:2][::order])
        found.append({client: v.tolist() for client, v in strategy.generator.embeddings.items()})
    assert found[0] == found[1]
    assert min(min(v) for v in found[0].values()) < 0  # of N(0, I)
    assert len(found[0][0]) == 3 and not set(found[0][0]) & set(found[0][1])


def test_novel_rounds_are_of_novel_clients_alone_and_are_reported():
    """After three rounds of training the novel clients learn, are scored, and the last round is
    the one to report: a phase of its own."""
    strategy = PFedHN(novel_rounds=2)
    strategy.nodes = [Node(0, 50), Node(1, 51), Node(7, 57, novel=True)]
    strategy._last_training_round, got = 3, []
    for number in (3, 4):
        strategy.now = Round(number)
        sampled = [node.client for node in strategy.sample()]
        got.append((sampled, strategy.frozen, strategy.selection_phase))
        got.append((strategy.evaluates_novel, strategy.report_last_round))
    assert got == [([0, 1], False, 0), (False, False), ([7], True, 1), (True, True)]


@pytest.mark.parametrize(("wanted", "scored"), [(True, [3, 4]), (False, [])])
def test_novel_clients_are_scored_once_they_have_learnt_if_at_all(wanted, scored):
    changes = {"method": "pfedhn", "novel-rounds": 2, "evaluate-novel": wanted}
    got = federate(**changes)[0].evaluate_metrics_clientapp
    assert [n for n, metrics in got.items() if "novel-accuracy" in metrics] == scored


def test_each_node_gets_the_model_of_its_own_embedding_and_the_weighted_counter():
    """θ = v: clients 0 and 1 get v_0 and v_1. Counters 3 of 1 sample and 10 of 6: 63 / 7 = 9."""
    strategy = PFedHN(embedding_dim=1, hidden_layers=0, bias=False)
    strategy.open(None, to_record({"w": np.zeros(1, np.float32), "n": np.array(0)}), {})
    nodes = [Node(0, 50), Node(1, 51)]
    strategy.ensure_embeddings(nodes)
    (weight,) = strategy.generator.network().parameters()
    with torch.no_grad():
        weight.fill_(1.0)
        strategy.generator.embeddings[0].fill_(-3.0)
        strategy.generator.embeddings[1].fill_(4.0)
    sent = strategy.broadcast({}, nodes)
    assert [sent[node]["w"].item() for node in nodes] == [-3.0, 4.0]
    got = [(nodes[0], 3, 1), (nodes[1], 10, 6)]
    strategy.aggregate({}, [Update(u, sent[u] | {"n": np.array(n)}, k, {}) for u, n, k in got])
    assert strategy.generator.targets.averaged[""]["n"].item() == 9
    assert strategy.may_stop and not PFedHN(novel_rounds=1).may_stop


def test_a_fixed_descriptor_has_no_gradient_that_clipping_could_count():
    strategy = PFedHN(descriptor="class-proportions", embedding_dim=2)
    strategy.open(None, to_record({"w": np.zeros(1, np.float32)}), {})
    strategy.generator.add_embedding(0, torch.tensor([0.25, 0.75]))
    assert not strategy.generator.embeddings[0].requires_grad


def test_counters_are_averaged_within_a_network_and_given_with_its_models():
    """S: (1·10 + 3·13) / 4 = 12.25 is 12, M: 7, and B, which nobody has, stays at 5. Row i of what
    is generated is node i's."""
    start = {"w": np.zeros(2, np.float32), "n": np.array(5)}
    targets = Targets(dict.fromkeys("SMB", start))
    nodes = [Node(i, 50 + i, properties={"model": m}) for i, m in enumerate("SMS")]
    got = zip(nodes, (10, 7, 13), (1, 2, 3), strict=True)
    targets.average([Update(node, {"n": np.array(n)}, k, {}) for node, n, k in got])
    assert {name: own["n"].item() for name, own in targets.averaged.items()} == (
        {"S": 12, "M": 7, "B": 5}
    )
    assert {name: [n.client for n in own] for name, own in targets.by_network(nodes).items()} == (
        {"S": [0, 2], "M": [1]}
    )
    models = targets.named({"w": torch.tensor([[1.0, 2], [3, 4]])}, nodes[::2], "S")
    assert {n.client: (m["w"].tolist(), m["n"].item()) for n, m in models.items()} == (
        {0: ([1, 2], 12), 2: ([3, 4], 12)}
    )
    assert [targets.has(node) for node in (nodes[0], Node(9, 59), Node(8, 58, properties={}))] == (
        [True, False, False]
    )


SHAPE = (1, 8, 8)


def everything():
    """The targets of a network of all kinds and, to compare, its arrays."""
    torch.manual_seed(0)
    network = networks_with_parts.Everything(SHAPE, 10)
    return Targets({"": model_arrays(network)}, {"": network}), model_arrays(network)


def test_trainable_weights_alone_are_generated_and_tied_ones_once():
    """In the network's own order; frozen arrays and averages go along, `third` has `second`'s."""
    targets, arrays = everything()
    generated = ["gain", "second.weight", "second.bias", "head.weight", "head.bias", "norm.weight",
                 "norm.bias", "third.bias"]  # fmt: skip
    assert list(targets.shapes()) == generated
    averaged = ["level", "batches", "order", "mask", "norm.running_mean", "norm.running_var",
                "norm.num_batches_tracked"]  # fmt: skip
    assert list(targets.averaged[""]) == averaged
    theta = {n: torch.full((2, *shape), i) + torch.arange(2.0).view(2, *(1 for _ in shape))
             for i, (n, shape) in enumerate(targets.shapes().items())}  # fmt: skip
    nodes = [Node(0, 50), Node(1, 51)]
    one, two = targets.named(theta, nodes, "").values()
    assert list(one) == list(two) == list(arrays)
    for name in arrays:
        source = "second.weight" if name == "third.weight" else name
        first = generated.index(source) if source in generated else arrays[name]
        second = first + 1 if source in generated else arrays[name]
        assert (one[name] == first).all() and (two[name] == second).all(), name
        assert (one[name].dtype, one[name].shape) == (arrays[name].dtype, arrays[name].shape)


def test_without_the_network_statistics_are_known_by_their_names_and_dtypes():
    _, arrays = everything()
    others = set(arrays) - set(Targets({"": arrays}).shapes())
    assert others == {"batches", "order", "mask", "norm.running_mean", "norm.running_var",
                      "norm.num_batches_tracked"}  # fmt: skip


def test_averages_are_saved_and_no_variance_is_negative():
    """Of 1 and 3 samples: means (4 + 3·8) / 4 = 7 and, of variances, (1 − 3·3) / 4 < 0."""
    targets, arrays = everything()
    got = [("norm.running_mean", 4, 8), ("norm.running_var", 1, -3), ("batches", 2, 7)]
    replies = [
        Update(Node(i, 50 + i), arrays | {n: np.full_like(arrays[n], v[i]) for n, *v in got}, k, {})
        for i, k in enumerate((1, 3))
    ]
    targets.average(replies)
    again, _ = everything()
    again.load(targets.averages())
    for name, expected in (("running_mean", 7), ("running_var", 0)):
        assert (again.averaged[""][f"norm.{name}"] == expected).all()
    assert again.averaged[""]["batches"] == 6
    sizes = Targets(dict.fromkeys("SM", arrays))
    sizes.load({"M/batches": np.array(3)})
    assert [sizes.averaged[size]["batches"] for size in "SM"] == [0, 3]
    assert sizes.averages().keys() == {f"{s}/{n}" for s in "SM" for n in sizes.averaged[s]}


def test_novel_clients_do_not_move_the_averages():
    strategy = PFedHN(embedding_dim=1, hidden_layers=0, novel_rounds=1)
    strategy._last_training_round = 1
    strategy.open(None, to_record({"w": np.zeros(1, np.float32), "n": np.array(0)}), {})
    node = Node(0, 50)
    for number, expected in ((1, 4), (2, 4)):
        strategy.now = Round(number)
        sent = strategy.broadcast({}, [node])[node]
        strategy.aggregate({}, [Update(node, sent | {"n": np.array(4 * number)}, 1, {})])
        assert strategy.generator.targets.averaged[""]["n"] == expected


def test_a_network_without_trainable_weights_is_refused():
    frozen = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable weights that could be generated"):
        Targets({"": model_arrays(frozen)}, {"": frozen})


SIZES = {"s": {"w": np.zeros((2, 2))}, "l": {"w": np.zeros((3, 4)), "b": np.zeros(3)}}  # float64
SETTINGS = {"method": "pfedhn", "num-clients": 6, "local-steps": 2, "evaluate-every": 1}


def run_small(**changes):
    """Run SETTINGS with `changes` in process; returns the result and the grid."""
    return federate(**SETTINGS | changes)


@pytest.mark.parametrize("chunk", [0, 2])
def test_clients_of_different_sizes_train_one_trunk(chunk):
    """One step of plain SGD on the surrogate Σ_i ½‖θ̃_i − h(v_i; φ)‖², here by autograd; φ takes
    the mean over clients, and the head of a size only its clients' part of it."""
    plain = {"server_momentum": 0.0, "server_weight_decay": 0.0, "clip_norm": 0.0}
    plain |= {"chunk_size": chunk}
    strategy = PFedHN(embedding_dim=3, hidden_dim=5, hidden_layers=1, models=SIZES, **plain)
    strategy.open(None, to_record(SIZES["s"]), {})
    nodes = [Node(i, 50 + i, properties={"model": m}) for i, m in enumerate(["s", "l", "s"])]
    sent = strategy.broadcast({}, nodes)
    assert [sent[node].keys() for node in nodes] == [{"w"}, {"w", "b"}, {"w"}]
    rng = np.random.default_rng(0)
    trained = [{n: a + rng.normal(size=a.shape) for n, a in sent[node].items()} for node in nodes]
    phi = dict(strategy.generator.network().named_parameters())
    loss = 0.0
    for node, reply in zip(nodes, trained, strict=True):
        v = strategy.generator.embeddings[node.client]
        theta = strategy.generator.generate([v], node.properties["model"])
        for name, array in reply.items():
            loss = loss + 0.5 * (torch.from_numpy(array) - theta[name][0]).square().sum()
    gradients = torch.autograd.grad(loss, list(phi.values()))
    expected = [(p - 0.01 / 3 * g).detach() for p, g in zip(phi.values(), gradients, strict=True)]
    strategy.aggregate({}, [Update(n, t, 1, {}) for n, t in zip(nodes, trained, strict=True)])
    for after, want in zip(phi.values(), expected, strict=True):
        torch.testing.assert_close(after.detach(), want, rtol=1e-10, atol=1e-14)


def test_a_size_that_nobody_knows_is_refused():
    strategy = PFedHN(embedding_dim=2, models=SIZES)
    strategy.open(None, to_record(SIZES["s"]), {})
    nodes = [Node(i, 50 + i, properties={"model": m}) for i, m in ((3, "s"), (4, "xl"), (5, "l"))]
    assert list(strategy.broadcast({}, nodes)) == [nodes[0], nodes[2]]
    assert strategy.now.dropped == {"model": 1}


def test_fixed_descriptors_have_the_size_that_most_tell():
    """Sizes 9, 2, 2 and none: the first one wins, those of two entries are taken."""
    strategy = PFedHN(descriptor="class-proportions", models=SIZES)
    strategy.open(None, to_record(SIZES["s"]), {})
    nodes = [Node(i, 50 + i, properties={"model": "s"}) for i in range(4)]
    got = [{"descriptor": np.full(n, 1 / n, np.float32)} for n in (9, 2, 2)] + [{}]
    replies = [Update(n, arrays, 1, {}) for n, arrays in zip(nodes, got, strict=True)]
    strategy.exchange = lambda *_: replies
    assert strategy.ensure_embeddings(nodes) == nodes[1:3]


def test_a_novel_client_that_trains_is_scored_on_what_it_does_not_train_on():
    """Of five samples two are validation: those where it trains, all five where it does not, or
    where it shows labels, which are not in `everything`. The share stays as it was."""
    held = replace(share(torch.ones(5, 1), [0] * 5, validation=[1, 4]), novel=True)
    for rounds, shots, scored in ((3, 0, 2), (0, 0, 5), (3, 1, 5)):
        own = replace(held, shots=shots)
        client = PFedHNClient(torch.nn.Linear(1, 2), own, novel_rounds=rounds)
        assert client.score({}, {})[1] == scored
        assert client.share is own
        client.share = replace(own, novel=False)  # a training client: what it never trains on
        assert client.score({}, {})[1] == 2


def test_sizes_are_dealt_by_configuration():
    result, grid = run_small(rounds=1, **{"client-models": "small,medium,big"})
    shapes = {a.numpy().shape for n, a in result.arrays.items() if "heads" in n and "weight" in n}
    assert len(grid.contexts) == 6
    assert {(100 * 64, 8), (200 * 64, 8), (400 * 64, 8)} <= shapes


def test_a_fixed_descriptor_is_the_class_proportions_and_is_not_learnt():
    import partitions

    fixed = {"pfedhn.descriptor": "class-proportions"}
    v = group(from_record(run_small(rounds=2, **fixed)[0].arrays), "embedding")
    federation = partitions.federation(SMALL | SETTINGS)
    for client, proportions in v.items():
        _, y = federation.share(int(client)).train[:]
        np.testing.assert_allclose(proportions, np.bincount(y, minlength=10) / len(y), rtol=1e-6)
    assert len(v) == 3


def test_class_shares_sum_to_one_over_the_training_clients():
    """Of the pooled training samples of each class, what each client has: p̂_i of section 5.3.
    With one client a round, too, the first request is of all."""
    import partitions

    fixed = {"pfedhn.descriptor": "class-shares", "fraction-train": 0.1}
    v = group(from_record(run_small(rounds=2, **fixed)[0].arrays), "embedding")
    federation = partitions.federation(SMALL | SETTINGS)
    counts = {}
    for client in map(int, v):
        _, y = federation.share(client).train[:]
        counts[client] = np.bincount(y, minlength=10)
    assert len(counts) == 3
    totals = sum(counts.values())
    for client, shares in v.items():
        expected = counts[int(client)] / np.maximum(totals, 1)
        np.testing.assert_allclose(shares, expected, rtol=1e-5)
    np.testing.assert_allclose(sum(v.values()), totals > 0, rtol=1e-5)


def test_class_shares_by_hand():
    """Proportions (¼, ¾) of 4 samples and (1, 0) of 6: counts (1, 3) and (6, 0), totals (7, 3).
    A novel client with (½, ½) of 14 has 7 and 7: more of the second class than all others."""
    strategy = PFedHN(descriptor="class-shares", models=SIZES)
    strategy.open(None, to_record(SIZES["s"]), {})
    one, two = (Node(i, 50 + i, properties={"model": "s"}) for i in range(2))
    new = Node(9, 59, novel=True, properties={"model": "s"})
    sent = {one: ([0.25, 0.75], 4), two: ([1.0, 0.0], 6), new: ([0.5, 0.5], 14)}
    strategy.nodes = [one, two, new]

    def reply(kind, nodes):
        return [
            Update(n, {"descriptor": np.array(sent[n][0], np.float32)}, sent[n][1], {})
            for n in nodes
        ]

    strategy.exchange = reply
    assert strategy.ensure_embeddings([two]) == [two]  # asks client 0 as well
    assert strategy.class_totals == [7.0, 3.0]
    assert strategy.ensure_embeddings([one, new]) == [one, new]
    got = {client: v.tolist() for client, v in strategy.generator.embeddings.items()}
    assert got[0] == pytest.approx([1 / 7, 1.0])
    assert got[1] == pytest.approx([6 / 7, 0.0])
    assert got[9] == pytest.approx([1.0, 7 / 3])


def test_without_a_training_clients_counts_there_are_no_shares():
    """A novel client alone replies: there is nothing to divide its counts by, until the training
    client replies, too."""
    strategy = PFedHN(descriptor="class-shares", models=SIZES)
    strategy.open(None, to_record(SIZES["s"]), {})
    one = Node(0, 50, properties={"model": "s"})
    new = Node(9, 59, novel=True, properties={"model": "s"})
    strategy.nodes = [one, new]
    counts = {"descriptor": np.float32([0.5, 0.5])}
    strategy.exchange = lambda kind, payloads: [Update(new, counts, 14, {})]
    assert strategy.ensure_embeddings([one, new]) == []
    assert strategy.now.dropped == {"model": 1} and "no training client" in strategy.now.failure
    strategy.exchange = lambda kind, payloads: [Update(node, counts, 14, {}) for node in payloads]
    assert strategy.ensure_embeddings([new]) == [new]
    assert strategy.generator.embeddings[9].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("spectral", [False, True])
def test_novel_labeled_clients_learn_embeddings_under_a_frozen_hypernetwork(spectral):
    """A spectral norm's power iteration rests as well."""
    before, after, one = (
        from_record(
            run_small(rounds=2, **{"novel-rounds": n, "pfedhn.spectral-norm": spectral})[0].arrays
        )
        for n in (0, 2, 1)
    )
    assert before.keys() < after.keys()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
    new = sorted(after.keys() - before.keys())
    assert len(new) == 3
    assert all((after[name] != one[name]).any() for name in new)


def test_the_same_novel_rounds_run_on_a_saved_model(tmp_path):
    """Rounds 3 and 4 after two of training equal rounds 1 and 2 of a later run but for the
    batches, which the round's number draws: so with all samples in one batch the same bits."""
    whole = {"batch-size": 10**4, "evaluate-every": 9, "novel-rounds": 2}
    here, _ = run_small(rounds=2, **whole)
    run_small(rounds=2, **whole | {"novel-rounds": 0, "output-dir": str(tmp_path)})
    later, _ = run_small(rounds=0, **whole | {"from-dir": str(tmp_path)})
    numbers = [dict(r.evaluate_metrics_clientapp[n]) for r, n in ((here, 4), (later, 2))]
    assert numbers[0].keys() == numbers[1].keys() >= {"novel-accuracy"}
    for name, array in from_record(here.arrays).items():
        np.testing.assert_allclose(from_record(later.arrays)[name], array, atol=1e-6)


class Leaving(InProcessGrid):
    """Node 1 is away in the second of three rounds, node 2 joins in the second."""

    rounds = 0

    def get_node_ids(self):
        away = {1} if self.rounds == 2 else {2} if self.rounds == 1 else set()
        return [i for i in self.contexts if i not in away]


def test_clients_join_and_leave_and_find_their_own_embedding():
    config = defaults() | SETTINGS | {"train-fraction": 1.0, "rounds": 3, "evaluate-every": 9}
    grid = Leaving.simulation(app, config, 6)
    seen = []

    class Spy(PFedHN):
        def configure_train(self, server_round, *arguments):
            grid.rounds = server_round
            return super().configure_train(server_round, *arguments)

        def aggregate(self, arrays, updates):
            result = super().aggregate(arrays, updates)
            seen.append({c: v.detach().clone() for c, v in self.generator.embeddings.items()})
            return result

    from fedapps.building import method_model
    from partitions.datasets.loading import info

    _, initial = method_model("pfedhn", config, info("digits"))
    Spy(embedding_dim=2, min_available_nodes=5).start(
        grid, to_record(initial), 3, train_config=None
    )
    first, second, third = seen
    assert first.keys() == {0, 2, 3, 4, 5}
    assert second.keys() == third.keys() == set(range(6))
    assert torch.equal(first[0], second[0])  # away
    assert not torch.equal(second[0], third[0])  # back, and learning on from its own


def test_the_personal_classifier_has_the_clients_own_classes():
    config = (
        defaults()
        | SETTINGS
        | {"method": "pfedhn-pc", "pfedhn-pc.local-classes": True, "rounds": 2}
    )
    result, grid = run_small(**config)
    assert not any("head." in name for name in result.arrays)
    heads = [state["personal/head.weight"] for state in states(grid, "pfedhn-pc").values()]
    assert [head.shape for head in heads] == [(2, 200)] * 3


def test_logits_of_foreign_classes_are_minus_infinity():
    """Classes 1 and 4 of 6: two outputs, put back at their places."""
    one = PFedHNPCClient(
        build_model("mlp-small", (3,), 6, 0),
        share(np.ones((4, 3), np.float32), [4, 1, 1, 4]),
        local_classes=True,
    )
    logits = one.predict(torch.ones(2, 3))
    assert logits.shape == (2, 6)
    assert torch.isinf(logits[:, [0, 2, 3, 5]]).all()
    torch.testing.assert_close(logits[:, [1, 4]], one.model(torch.ones(2, 3)))
    x = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, -2.0]])
    torch.testing.assert_close(one.personal_model(x)(x), one.predict(x))  # what its owner gets
    expected = -logits[:1, [1, 4]].log_softmax(1)[0, 1]
    torch.testing.assert_close(one.loss(torch.ones(1, 3), torch.tensor([4])), expected)


def test_a_clients_classes_are_those_of_its_training_labels():
    """Class 4 is among its validation samples alone: it is never predicted, so that sample is
    wrong. One training sample has no label."""
    held = share(np.ones((5, 3), np.float32), [4, 1, 1, 2, -1], validation=[0])
    held = replace(held, train=replace(held.train, index=torch.tensor([1, 2, 3, 4])))
    model = build_model("mlp-small", (3,), 6, 0)
    one = PFedHNPCClient(model, held, local_classes=True)
    assert one.classes.tolist() == [1, 2]
    loss, count, scores = score_samples(one, held.validation)
    assert (loss, count, scores["accuracy"]) == (math.inf, 1, 0.0)
    nothing = replace(held, train=replace(held.train, index=torch.tensor([4])))
    assert PFedHNPCClient(model, nothing, local_classes=True).classes is None


def test_a_classifiers_momentum_is_cleared_in_each_round_and_its_gradient_clipped_with_the_rest():
    """The gradient of inputs of 10⁴ is longer than 50: the only step of each round has the length
    lr · 50 over all arrays. A momentum that persisted would give the second round up to 1.9 times
    that."""
    model = build_model("mlp-small", (3,), 2, 0)
    held = share(np.full((4, 3), 1e4, np.float32), [0, 1, 1, 1])
    one = PFedHNPCClient(model, held, lr=1e-4, weight_decay=0.0, local_steps=1, batch_size=4)
    for round_ in (1, 2):
        before = {name: array.copy() for name, array in model_arrays(model, ()).items()}
        one.fit_locally({"server-round": round_})
        moved = [array - before[name] for name, array in model_arrays(model, ()).items()]
        length = math.sqrt(sum(float(np.square(m, dtype=np.float64).sum()) for m in moved))
        assert length == pytest.approx(50e-4, rel=1e-3)
    assert np.abs(moved[-1]).max() > 0  # the head's


def test_a_folder_without_a_model_is_refused():
    with pytest.raises(ValueError, match="holds no model"):
        run(None, defaults() | {"method": "pfedhn", "from-dir": "/nowhere"})
