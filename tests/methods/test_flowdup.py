"""FLowDUP's client: θ₀ + P v, v of a set, Ω and clients without labels, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import share, update
from torch import nn
from torch.nn import functional as F

from clients.core.protocol import UNLABELED
from clients.methods.flowdup import FLowDUPClient, LowDimensional
from clients.models import build_model
from partitions.datasets.loading import Info
from strategies.methods.fedavg import FedAvg
from strategies.methods.flowdup import FLowDUP

INFO = Info("tiny", (1, 2, 2), 3, "")


class Tied(nn.Module):
    """Two layers of one weight, a frozen bias, batch normalisation and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.norm(self.second(self.first(x.flatten(1)))))


def make(n=6, dimension=7, labels=None, **settings):
    torch.manual_seed(0)
    base = build_model("mlp-small", INFO.shape, 3, 0)
    model = FLowDUPClient.build_network(base, INFO, dimension=dimension)
    x = torch.randn(n, 1, 2, 2, generator=torch.manual_seed(1))
    y = torch.arange(n) % 3 if labels is None else labels
    return FLowDUPClient(model, share(x, y), **settings), x, y


def served(client, x):
    """The network that the inputs x generate."""
    client.predict(x)
    return client.personal_model(x)


def test_each_weight_follows_one_entry_of_v_by_hand():
    """Five weights and k = 2: columns of 3 and of 2 rows, entries ±1/√3 and ±1/√2. So PᵀP = 1."""
    target = nn.Linear(4, 1)
    theta_0 = [target.weight.detach().clone(), target.bias.detach().clone()]
    net = LowDimensional(target, (4,), 2, 0)
    p = torch.zeros(5, 2)
    p[torch.arange(5), net.column] = net.entry
    assert sorted(net.column.bincount().tolist()) == [2, 3]
    torch.testing.assert_close(p.T @ p, torch.eye(2))
    theta = net.generated(torch.tensor([3.0, -5.0]))
    flat = torch.cat([theta["weight"].flatten(), theta["bias"]])
    expected = torch.cat([theta_0[0].flatten(), theta_0[1]]) + p @ torch.tensor([3.0, -5.0])
    torch.testing.assert_close(flat, expected)
    signs = LowDimensional(nn.Linear(100, 10), (100,), 3, 0).entry.sign()
    assert 400 < int((signs > 0).sum()) < 600


def test_the_seed_decides_the_projection_and_neither_it_nor_the_start_is_sent():
    one, two, other = (
        LowDimensional(build_model("mlp-small", INFO.shape, 3, 0), INFO.shape, 7, seed)
        for seed in (0, 0, 1)
    )
    assert torch.equal(one.column, two.column) and torch.equal(one.entry, two.entry)
    assert not torch.equal(one.column, other.column) and not torch.equal(one.entry, other.entry)
    assert all(name.startswith("encoder.") or name == "center" for name in one.state_dict())
    few = LowDimensional(nn.Linear(2, 1), (2,), 1000, 0)
    assert few.center.shape == (3,)  # not more than there are weights


def test_without_a_projection_all_clients_have_the_first_network():
    client, x, _ = make()
    plain = build_model("mlp-small", INFO.shape, 3, 0).eval()
    client.receive(client.initial, {})
    assert not torch.allclose(client.predict(x), plain(x))
    client.model.entry.zero_()
    assert torch.equal(client.predict(x), plain(x))
    assert torch.equal(client.predict(x + 1), plain(x + 1))


def test_an_encoder_that_sees_nothing_gives_all_clients_one_model():
    """LD-FedAvg: θ₀ + P v with one v, here the bias of the last layer."""
    client, x, _ = make()
    client.receive(client.initial, {})
    with torch.no_grad():
        client.model.encoder.out.weight.zero_()
    one, two = served(client, x).state_dict(), served(client, x + 1).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    torch.testing.assert_close(client.v(x), client.model.encoder.out.bias)


def test_v_ignores_order_duplicates_and_parts():
    client, x, _ = make(n=7)
    client.receive(client.initial, {})
    v = client.v(x)
    torch.testing.assert_close(client.v(x.flip(0)), v)
    torch.testing.assert_close(client.v(torch.cat([x, x, x])), v)
    assert not torch.allclose(client.v(x[:3]), v)
    client.pass_megabytes = 3 * 16 / 2**20  # parts of 3, 2 and 2 samples
    assert [len(part) for part in client.parts(x)] in ([3, 2, 2], [2] * 3 + [1])
    torch.testing.assert_close(client.v(x), v)


def test_omega_by_hand():
    """v = (1, 2), ψ_r = (3, −1): ‖v − ψ_r‖² = 4 + 9 = 13 and ‖ψ_r‖² = 10. The encoder's weights are
    all ½, m of them: Ω = 13/(2·0.5) + (m/4)/(2·3) + 10/(2·4)."""
    client, _, _ = make(dimension=2, alpha_theta=0.5, alpha_h=3.0, alpha_r=4.0)
    net, m = client.model, 0
    with torch.no_grad():
        net.center.copy_(torch.tensor([3.0, -1.0]))
        for parameter in net.encoder.parameters():
            parameter.fill_(0.5)
            m += parameter.numel()
    omega = client.regularizer(torch.tensor([1.0, 2.0]))
    assert float(omega.detach()) == pytest.approx(13 + m / 24 + 1.25, rel=1e-5)


def test_the_loss_of_one_half_with_the_v_of_the_other():
    """Five samples: v of the first two, CE of the last three."""
    client, x, y = make(n=5, penalty=0.25)
    net = client.model
    v = net.encoder(x[:2])
    expected = F.cross_entropy(served(client, x[:2])(x[2:]), y[2:]) + 0.25 * client.regularizer(v)
    torch.testing.assert_close(client.loss(x, y), expected)
    for n in (1, 2):  # they give v and have the loss
        few = F.cross_entropy(served(client, x[:n])(x[:n]), y[:n])
        expected = few + 0.25 * client.regularizer(net.encoder(x[:n]))
        torch.testing.assert_close(client.loss(x[:n], y[:n]), expected)


def test_a_client_without_labels_has_omega_alone():
    """Its steps equal those on Ω; without λ it sends ψ back as it came, and no loss."""
    hidden = torch.full((6,), -1)
    client, x, y = make(labels=hidden, penalty=0.25)
    assert client.get_properties({})["unlabeled"] is True
    assert "unlabeled" not in make()[0].get_properties({})
    v = client.model.encoder(x[:3])
    torch.testing.assert_close(client.loss(x, y), 0.25 * client.regularizer(v))
    settings = {"local_steps": 2, "lr": 0.5}
    for penalty in (0.0, 0.25):
        client, _, _ = make(labels=hidden, penalty=penalty, **settings)
        reply, n, metrics = client.train(client.initial, {})
        assert (n, metrics) == (6, {})
        same = [np.array_equal(reply[name], a) for name, a in client.initial.items()]
        assert all(same) == (penalty == 0)
    assert "loss" in make(**settings)[0].train(client.initial, {})[2]


def test_novel_clients_and_few_labels_are_not_unlabeled():
    client, _, _ = make(labels=torch.full((6,), -1))
    assert not replace(client.share, novel=True).unlabeled
    assert not make(labels=torch.tensor([-1, -1, -1, -1, -1, 0]))[0].share.unlabeled


def test_tied_frozen_and_normalised_networks():
    """Tied weights stay one. A frozen bias and running statistics are sent and not generated; the
    statistics are those of training."""
    target = Tied()
    model = FLowDUPClient.build_network(target, Info("tiny", (3,), 2, ""), dimension=4)
    x, y = torch.randn(8, 3, generator=torch.manual_seed(1)), torch.arange(8) % 2
    client = FLowDUPClient(model, share(x, y), local_steps=3)
    sent = {n for n in model.state_dict() if n.startswith("target.")}
    assert sent == {
        "target.first.bias",
        *(f"target.norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")),
    }
    reply, _, _ = client.train(client.initial, {})
    assert reply["target.norm.num_batches_tracked"] == 3
    assert "target.first.bias" not in reply  # it is frozen
    client.receive(reply, {})
    logits, network = client.predict(x), client.personal_model(x)
    torch.testing.assert_close(network(x), logits)
    assert network.first.weight is network.second.weight
    assert network.state_dict().keys() == Tied().state_dict().keys()
    assert isinstance(network.first.weight, nn.Parameter)


def test_training_moves_every_part_of_psi():
    client, _, _ = make(local_steps=3, penalty=0.1)
    reply, _, _ = client.train(client.initial, {})
    assert all(not np.array_equal(reply[name], a) for name, a in client.initial.items())


def replies(*rows):
    """Of clients that send w, with so many samples and with or without labels."""
    found = [update(i, {"w": np.full(1, w, np.float32)}, n) for i, (w, n, _) in enumerate(rows)]
    nodes = [replace(u.node, properties={} if row[2] else {UNLABELED: True})
             for u, row in zip(found, rows, strict=True)]  # fmt: skip
    return [replace(u, node=node) for u, node in zip(found, nodes, strict=True)]


def test_clients_without_labels_do_not_divide_the_steps_of_the_others():
    """From 10: with labels +4 (3 samples) and +8 (1 sample), mean +5; without labels −2 (4) and −8
    (2), mean −4, which counts with their share 6/10: 10 + 5 − 2.4."""
    start = {"w": np.full(1, 10, np.float32)}
    mixed = replies((14, 3, True), (8, 4, False), (18, 1, True), (2, 2, False))
    found = FLowDUP().aggregate(start, mixed)["w"]
    assert found.dtype == np.float32 and found.item() == pytest.approx(12.6)
    for one_kind in (replies((14, 3, True), (18, 1, True)), replies((8, 4, False), (2, 2, False))):
        assert FLowDUP().aggregate(start, one_kind) == FedAvg().aggregate(start, one_kind)
    still = replies((14, 3, True), (10, 400, False), (18, 1, True))
    assert FLowDUP().aggregate(start, still)["w"].item() == 15


def test_a_median_is_of_clients_with_labels():
    """Ten clients without labels barely move; the median of the three others is 16."""
    start = {"w": np.full(1, 10, np.float32)}
    rows = [(14, 1, True), (16, 1, True), (90, 1, True), *[(10.0, 1, False)] * 10]
    assert FLowDUP(robust="median").aggregate(start, replies(*rows))["w"].item() == 16
