"""The linear hypernetwork against PCA; variants of the hypernetwork."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from torch import nn

from clients.core.arrays import to_record
from clients.core.client import Client
from partitions.shares import Samples, Share
from strategies.core.replies import Node, Update
from strategies.maths.hypernetwork import Hypernetwork
from strategies.methods import _generated_networks
from strategies.methods.pfedhn import PFedHN

D, K, N = 4, 2, 5  # entries of θ, of v, clients


class Regression(Client):
    """A linear regressor θ with the loss ‖Xθ − y‖², in float64; labels number the targets."""

    def loss(self, x, y):
        return (self.model(x.double())[:, 0] - self.targets[y]).square().sum()


def clients(rng):
    """Clients whose XᵀX = I, and their own least-squares solutions Xᵀy, of decaying spread."""
    made, solutions = [], []
    for i in range(N):
        x = torch.from_numpy(np.linalg.qr(rng.normal(size=(10, D)))[0].astype(np.float32))
        exact = x.double().numpy()
        y = exact @ (rng.normal(size=D) * 2.0 ** -np.arange(D)) + 0.01 * rng.normal(size=10)
        samples = Samples(x, torch.arange(10), torch.arange(10), scale=1.0)
        model = nn.Sequential(nn.Linear(D, 1, bias=False)).double()
        share = Share(samples, samples, None, samples, False)
        made.append(Regression(model, share, client=i, lr=0.25, local_steps=1, batch_size=10))
        made[-1].targets = torch.from_numpy(y)
        solutions.append(np.linalg.lstsq(exact, y, rcond=None)[0])
    return made, np.array(solutions)


def test_the_linear_hypernetwork_finds_the_clients_principal_components():
    """Proposition 1: the optimal W spans the top-k principal components of the clients' own
    solutions θ̄_i (not centred), and W v_i is the projection of θ̄_i on them."""
    made, solutions = clients(np.random.default_rng(0))
    strategy = PFedHN(
        embedding_dim=K, hidden_layers=0, bias=False, server_lr=1.0, server_momentum=0.9,
        server_weight_decay=0.0, clip_norm=0.0,
    )  # fmt: skip
    strategy.open(None, to_record({"0.weight": np.zeros((1, D))}), {})
    nodes = [Node(i, 50 + i) for i in range(N)]
    for _ in range(300):
        sent = strategy.broadcast({}, nodes)
        replies = [c.train(sent[node], {})[0] for c, node in zip(made, nodes, strict=True)]
        strategy.aggregate({}, [Update(n, r, 1, {}) for n, r in zip(nodes, replies, strict=True)])
    components = np.linalg.svd(solutions)[2][:K].T
    w = strategy.generator.network().heads[0].weight.detach().numpy()
    assert subspace_angles(w, components).max() < 1e-3
    theta = strategy.personalize({}, nodes)
    found = np.array([theta[node]["0.weight"][0] for node in nodes])
    np.testing.assert_allclose(found, solutions @ components @ components.T, atol=1e-3)


def test_spectral_normalisation_bounds_every_layer():
    torch.manual_seed(0)
    network = Hypernetwork({"w": (3, 4)}, 5, 8, 2, spectral=True)
    for _ in range(50):
        network(torch.ones(1, 5))  # power iteration goes on in training
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 4  # two hidden ones, the trunk's linear end, the head
    for layer in layers:
        largest = torch.linalg.matrix_norm(layer.weight.detach(), 2)
        assert float(largest) == pytest.approx(1.0, abs=1e-2)


def test_networks_of_several_sizes_share_the_trunk_and_have_heads_of_their_own():
    network = Hypernetwork({"s/w": (2, 2), "l/w": (4, 4), "l/b": (4,)}, 3)
    v = torch.ones(2, 3)
    small, large = network(v, "s"), network(v, "l")
    assert {n: tuple(t.shape) for n, t in small.items()} == {"w": (2, 2, 2)}
    assert {n: tuple(t.shape) for n, t in large.items()} == {"w": (2, 4, 4), "b": (2, 4)}


def test_the_trunk_ends_in_a_linear_layer():
    """Two ReLU layers of 5 units, then 5 without: the heads' inputs take either sign."""
    torch.manual_seed(0)
    net = Hypernetwork({"w": (2, 3)}, embedding_dim=4, hidden_dim=5, hidden_layers=2)
    sizes = [(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in net.trunk]
    assert [type(one) for one in sizes[1::2]] == [nn.ReLU, nn.ReLU]
    assert sizes[::2] == [(4, 5), (5, 5), (5, 5)]
    v = torch.randn(20, 4)
    assert net.trunk(v).min() < 0 < net.trunk(v).max()
    assert not any(isinstance(m, nn.ReLU) for m in Hypernetwork({"w": (2,)}, 4, 5, 0).modules())


def test_chunks_are_parts_of_the_networks_in_their_order():
    """Networks of 3 + 4 and 5 weights in chunks of 4: b ends within the second chunk, where the
    other network begins. Chunk k is the head's output for (v, c_k)."""
    shapes = {"small/a": (3,), "small/b": (2, 2), "big/c": (5,)}
    network = Hypernetwork(shapes, 6, 8, 1, chunk=4)
    assert network.chunks.shape[0] == 3 and [h.out_features for h in network.heads] == [4]
    v = torch.randn(2, 6)
    inputs = [torch.cat([v, c.expand(2, -1)], 1) for c in network.chunks]
    flat = torch.cat([network.heads[0](network.trunk(x)) for x in inputs], 1)
    small, big = network(v, "small"), network(v, "big")
    assert [*small, *big] == ["a", "b", "c"]
    torch.testing.assert_close(small["a"], flat[:, :3])
    torch.testing.assert_close(small["b"], flat[:, 3:7].view(2, 2, 2))
    torch.testing.assert_close(big["c"], flat[:, 7:])
    every = network(v)
    torch.testing.assert_close([every["small/b"], every["big/c"]], [small["b"], big["c"]])


def test_more_memory_than_there_is_is_refused(monkeypatch):
    """4 bytes for each entry of φ, its gradient, its momentum, and φ and momentum to undo a round.
    A layer of 100 → 1000 weights has 101 000 entries."""
    initial = to_record({"w": np.zeros(1000, np.float32)})
    phi = 1000 * 101 + 3 * 100 * 101 + 100 * 2
    for free, options, refused in (
        (20 * phi - 1, {}, True),
        (20 * phi, {}, False),
        (20 * phi, {"server_optimizer": "adam"}, True),
        (20 * phi, {"hidden_dim": 200}, True),
        (9 * phi, {"chunk_size": 100}, False),
    ):
        monkeypatch.setattr(_generated_networks, "memory_left", lambda free=free: free)
        strategy = PFedHN(embedding_dim=1, **options)
        if refused:
            with pytest.raises(ValueError, match=r"GB are free\. Set chunk-size, as to 1000, a"):
                strategy.open(None, initial, {})
        else:
            strategy.open(None, initial, {})


def test_a_finished_run_is_served_with_less_memory(monkeypatch):
    initial = to_record({"w": np.zeros(1000, np.float32)})
    trained = PFedHN(embedding_dim=1)
    trained.open(None, initial, {})
    trained.ensure_embeddings([Node(3, 53)])
    monkeypatch.setattr(_generated_networks, "memory_left", lambda: 1)
    served = PFedHN(embedding_dim=1, former={"arrays": trained.generator.arrays()})
    served.open(None, initial, {})
    (one, two) = (s.personalize({}, [Node(3, 53)]) for s in (trained, served))
    assert np.array_equal(*(model[Node(3, 53)]["w"] for model in (one, two)))
