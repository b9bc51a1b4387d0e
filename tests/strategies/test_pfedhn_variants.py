"""pFedHN: sizes, fixed descriptors, novel labeled clients, joins and leaves, saved models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import federate, share, states

from clients.core.arrays import from_record, group, to_record
from clients.methods.pfedhn import PFedHNClient, PFedHNPCClient
from clients.models import build_model
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from strategies.core.replies import Node, Update
from strategies.methods.pfedhn import PFedHN

SIZES = {"s": {"w": np.zeros((2, 2))}, "l": {"w": np.zeros((3, 4)), "b": np.zeros(3)}}  # float64


SETTINGS = {"method": "pfedhn", "num-clients": 6, "local-steps": 2, "evaluate-every": 1}


def go(**changes):
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
    phi = dict(strategy.network().named_parameters())
    loss = 0.0
    for node, reply in zip(nodes, trained, strict=True):
        theta = strategy.generate([node], node.properties["model"])
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
    result, grid = go(rounds=1, **{"client-models": "small,medium,big"})
    shapes = {a.numpy().shape for n, a in result.arrays.items() if "heads" in n and "weight" in n}
    assert len(grid.contexts) == 6
    assert {(100 * 64, 8), (200 * 64, 8), (400 * 64, 8)} <= shapes


def test_a_fixed_descriptor_is_the_class_proportions_and_is_not_learnt():
    import partitions

    fixed = {"pfedhn.descriptor": "class-proportions"}
    v = group(from_record(go(rounds=2, **fixed)[0].arrays), "embedding")
    federation = partitions.federation(defaults() | SETTINGS)
    for client, proportions in v.items():
        _, y = federation.share(int(client)).train[:]
        np.testing.assert_allclose(proportions, np.bincount(y, minlength=10) / len(y), rtol=1e-6)
    assert len(v) == 3


@pytest.mark.parametrize("spectral", [False, True])
def test_novel_labeled_clients_learn_embeddings_under_a_frozen_hypernetwork(spectral):
    """A spectral norm's power iteration rests as well."""
    before, after, one = (
        from_record(go(rounds=2, **{"novel-rounds": n, "pfedhn.spectral-norm": spectral})[0].arrays)
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
    here, _ = go(rounds=2, **whole)
    go(rounds=2, **whole | {"novel-rounds": 0, "output-dir": str(tmp_path)})
    later, _ = go(rounds=0, **whole | {"from-dir": str(tmp_path)})
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
            seen.append({c: v.detach().clone() for c, v in self.embeddings.items()})
            return result

    from fedapps.node.building import method_model
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
    result, grid = go(**config)
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


def test_a_clients_classes_are_those_of_all_that_it_holds():
    """Class 4 is among its validation samples alone, and scored; a few shots are all that a novel
    client shows."""
    held = share(np.ones((4, 3), np.float32), [4, 1, 1, 2], validation=[0])
    held = replace(held, train=replace(held.train, index=torch.tensor([1, 2, 3])))
    for shots, classes in ((0, [1, 2, 4]), (1, [1, 2])):
        model = build_model("mlp-small", (3,), 6, 0)
        one = PFedHNPCClient(model, replace(held, shots=shots), local_classes=True)
        assert one.classes.tolist() == classes


def test_a_folder_without_a_model_is_refused():
    with pytest.raises(ValueError, match="holds no model"):
        run(None, defaults() | {"method": "pfedhn", "from-dir": "/nowhere"})
