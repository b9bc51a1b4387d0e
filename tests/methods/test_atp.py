"""ATP: directions, adaptation, the gradient of the rates, and both phases."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_runs import SMALL, Watched, federate, share, states, update
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from clients.core.client import Client
from clients.core.normalisation import entropy
from clients.methods.atp import RATES, ATPClient, adaptable
from clients.models import build_model
from fedapps.clientapp import app
from fedapps.serverapp import run
from fedapps.service import figures
from strategies.core.replies import Node
from strategies.core.round_state import Round
from strategies.methods.atp import ATP


def network(*, double=True):
    """Two normalisation layers, dropout, a frozen weight."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 5),
            nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3),
        )  # fmt: skip
        for norm in (model[1], model[5]):
            norm.running_mean += torch.rand(norm.num_features)
            norm.running_var *= 1 + torch.rand(norm.num_features)
            nn.init.uniform_(norm.weight, 0.5, 2)
        model[7].weight.mul_(6)
        model[0].weight.mul_(3)
    model[4].bias.requires_grad_(False)
    return model.double() if double else model


X = torch.randn(30, 4, generator=torch.manual_seed(3), dtype=torch.float64)
Y = torch.arange(30) % 3


def client(double=True, **settings):
    x = X if double else X.float()
    model = ATPClient.build(network(double=double), None)
    atp = ATPClient(model, share(x, Y), **{"held_out": 0.0, **settings})
    atp.model.eval()
    return atp


def test_every_tensor_has_a_rate():
    """Of four linear and normalisation layers' 2 tensors each, one is frozen; 2·2 statistics."""
    atp = client()
    assert len(adaptable(atp.model)) == len(atp.alpha) == 4 * 2 + 2 - 1 + 4
    assert "4.bias" not in adaptable(atp.model)
    assert "5.running_var" in adaptable(atp.model)
    buffers = {n for n, _ in build_model("convnet-bn", (1, 8, 8), 3, 0).named_buffers()}
    assert len([n for n in buffers if "running" in n]) == 4


def test_without_rates_it_is_fedavg_to_the_last_bit():
    atp = client(double=False)
    x = X[:20].float()
    assert torch.equal(atp.predict(x), Client.predict(atp, x))
    atp.test_batch_size = 7
    with torch.no_grad():
        each = torch.cat([atp.model(b) for b in x.split(7)])
    assert torch.equal(atp.predict(x), each)


def test_directions_by_hand():
    """A layer's inputs 1, 3 (mean 2, unbiased variance 2) at running 5 and 7: h = 3 and 5. The
    layer after it sees what the layer gives unadapted. One input leaves the statistics alone."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2, bias=False), nn.BatchNorm1d(2))
    model[0].running_mean += 5
    model[0].running_var += 6
    atp = ATPClient(ATPClient.build(model, None), share(torch.ones(1, 1), [0]))
    x = torch.tensor([[1.0], [3.0]])
    h = atp.directions(x)
    assert (h["0.running_mean"].item(), h["0.running_var"].item()) == (3, 5)
    inner = (x - 5) / math.sqrt(7 + 1e-5) @ model[1].weight.T
    torch.testing.assert_close(h["2.running_mean"], -inner.mean(0).detach())
    torch.testing.assert_close(h["2.running_var"], 1 - inner.var(0).detach())
    assert h["1.weight"].norm() > 0
    assert atp.directions(x[:1])["0.running_var"].item() == 0
    atp.alpha[:] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 2.0, 0.0, 0.0])
    theta = atp.changes(x)  # in the order of `adaptable`: five parameters, then statistics
    assert (theta["0.running_mean"].item(), theta["0.running_var"].item()) == (3.5, 0.0)  # 7 − 10


def test_the_rates_of_one_step_of_entropy():
    """α = lr on parameters and 0 on statistics: one SGD step on the mean entropy."""
    atp = client(test_batch_size=0)
    names = list(adaptable(atp.model))
    atp.alpha[:] = torch.tensor([0.0 if "running" in n else 0.3 for n in names])
    model = network().eval()
    entropy(model(X)).backward()
    theta = atp.changes(X)
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(theta[name], (p - 0.3 * p.grad).detach())
    torch.testing.assert_close(theta["1.running_var"], model[1].running_var)


def test_rates_of_one_on_statistics_normalise_the_first_layer_by_the_batch():
    atp = client(test_batch_size=0)
    atp.alpha[:] = torch.tensor([float("running" in n) for n in adaptable(atp.model)])
    theta, h = atp.changes(X), atp.model[0](X).detach()
    torch.testing.assert_close(theta["1.running_mean"], h.mean(0))
    torch.testing.assert_close(theta["1.running_var"], h.var(0))
    adapted = F.relu(F.batch_norm(h, h.mean(0), h.var(0), atp.model[1].weight, atp.model[1].bias))
    second = atp.model[4](adapted).detach()
    assert not torch.allclose(theta["5.running_mean"], second.mean(0))


def test_the_step_of_a_rate_is_its_exact_gradient():
    """The central difference of CE(θ'(α)) in each α_l is −⟨g_l, h_l⟩; the step is
    η ⟨g_l, h_l⟩ / √d_l."""
    atp = client(rates_lr=0.7)
    start = 0.05 * torch.randn(len(atp.alpha), generator=torch.manual_seed(5))
    x, y = X[:8], Y[:8]
    h = {n: t.clone() for n, t in atp.directions(x).items()}
    sizes = [t.numel() for t in h.values()]

    def loss(alpha):
        atp.model.get_buffer(RATES).copy_(alpha)
        with torch.no_grad():
            return float(F.cross_entropy(functional_call(atp.model, atp.adapted_by(h), (x,)), y))

    atp.model.double()
    start, slopes = start.double(), []
    for i in range(len(start)):
        step = torch.zeros_like(start)
        step[i] = 1e-5
        slopes.append((loss(start + step) - loss(start - step)) / 2e-5)
    atp.model.get_buffer(RATES).copy_(start)
    atp.learn(x, y)
    steps = (atp.alpha - start).numpy()
    expected = [-0.7 * slope / math.sqrt(d) for slope, d in zip(slopes, sizes, strict=True)]
    assert steps == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert np.abs(steps).min() > 1e-6
    assert "forward" not in vars(atp.model[1])


class ByKeyword(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(input=x)


class Clamped(nn.BatchNorm1d):
    """A layer of the user's own, which does more than its base class."""

    def forward(self, input):
        return super().forward(input.clamp(-0.5, 0.5))


@pytest.mark.parametrize(
    "norm",
    [
        ByKeyword(nn.BatchNorm1d(4)),
        Clamped(4),
        nn.BatchNorm1d(4, bias=False),
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4, track_running_stats=False),
    ],
)
def test_rates_are_learnt_by_the_network_as_it_is(norm):
    """With rates of 0 the loss is that of the network in evaluation mode, whatever kind of batch
    normalisation it has and however it calls it."""
    weight = getattr(norm, "norm", norm).weight
    if weight is not None:
        nn.init.constant_(weight, 3.0)
    model = nn.Sequential(norm, nn.Linear(4, 3)).double()
    atp = ATPClient(ATPClient.build(model, None), share(X, Y), held_out=0.0)
    with torch.no_grad():
        expected = float(F.cross_entropy(model.eval()(X), Y))
    assert atp.learn(X, Y) == pytest.approx(expected, rel=1e-6)
    with_statistics = getattr(norm, "norm", norm).running_mean is not None
    assert with_statistics == any("running" in name for name in adaptable(model))


def test_layers_with_the_same_statistics_are_refused():
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.running_mean = first.running_mean
    model = nn.Sequential(first, second, nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"atp adapts the running statistics .* '0' and '1'"):
        ATPClient.build(model, None)


def test_the_statistics_of_a_layer_are_means_over_its_calls():
    """1 and 3 (mean 2, variance 2), then 1 and 3 at running 0 and 4: ½ and 1½ (1 and ½)."""
    norm = nn.BatchNorm1d(1, affine=False, eps=1e-12)
    norm.running_var += 3
    model = nn.Sequential(norm, norm, nn.Linear(1, 2))
    atp = ATPClient(ATPClient.build(model, None), share(torch.ones(1, 1), [0]))
    h = atp.directions(torch.tensor([[1.0], [3.0]]))
    assert h["0.running_mean"].item() == pytest.approx(-1.5)
    assert h["0.running_var"].item() == pytest.approx(4 - 1.25)


def test_online_is_the_mean_over_the_batches_so_far():
    """Equal to batch on the first batch, to the last bit; the last mean ignores the order."""
    online, batch = (client(prediction=p, test_batch_size=10) for p in ("online", "batch"))
    for atp in (online, batch):
        atp.alpha[:] = 0.2
    one, other = online.predict(X), batch.predict(X)
    assert torch.equal(one[:10], other[:10])
    assert not torch.allclose(one[10:], other[10:])
    torch.testing.assert_close(other[10:20], batch.predict(X[10:20]))
    last = online.personal_model(X)
    order = torch.cat([X[20:], X[:10], X[10:20]])
    online.predict(order)
    torch.testing.assert_close(online.personal_model(order).state_dict(), last.state_dict())
    torch.testing.assert_close(last(X[20:]), one[20:])
    three = [batch.changes(b)["7.weight"] for b in X.split(10)]
    torch.testing.assert_close(last[7].weight.detach(), sum(three) / 3)
    assert RATES not in last.state_dict()


def test_a_client_learns_from_held_out_samples_alone_and_keeps_the_network():
    """30 samples, 6 held out, in batches of 4 and 2: two steps, each from the network as sent. The
    second time only the rates arrive."""
    atp = client(double=False, held_out=0.2, test_batch_size=4)
    sent = {n: t.numpy().copy() for n, t in atp.model.state_dict().items()}
    batches, learn = [], atp.learn
    atp.learn = lambda x, y: batches.append(y.tolist()) or learn(x, y)
    reply, n, metrics = atp.train(sent, {"learn-rates": True})
    assert batches == [[0, 2, 1, 0], [2, 1]] and n == 6 and metrics["loss"] > 0
    assert reply.keys() == {RATES} and np.abs(reply[RATES]).min() > 0
    again, *_ = atp.train({RATES: sent[RATES]}, {"learn-rates": True})
    assert np.array_equal(again[RATES], reply[RATES])
    atp.state = {}
    with pytest.raises(ValueError, match="not in the state"):
        atp.train({RATES: sent[RATES]}, {"learn-rates": True})


def test_the_server_takes_the_plain_mean_of_the_rates():
    strategy = ATP(fedavg_rounds=1)
    strategy.now = Round(2)
    arrays = {"w": np.ones(2), RATES: np.zeros(2, np.float32)}
    assert strategy.expected(arrays).keys() == {RATES}
    replies = [update(i, {RATES: np.array(a, np.float32)}, n=9 * i + 1)
               for i, a in enumerate(([1, 2], [3, 6]))]  # fmt: skip
    after = strategy.aggregate(arrays, replies)
    assert after[RATES].tolist() == [2, 4] and after["w"] is arrays["w"]
    sent = strategy.broadcast(after, [Node(0, 5), Node(2, 7)])
    assert [set(a) for a in sent.values()] == [{RATES}, {"w", RATES}]


def test_both_phases_in_a_run(tmp_path):
    """Two rounds of FedAvg, equal to FedAvg's with the same samples; then the network is fixed, is
    sent once, and only rates come back. The reported round has rates."""
    common = {"model": "convnet-bn", "rounds": 4, "atp.fedavg-rounds": 2, "atp.held-out": 0.0}
    config = SMALL | common | {"method": "atp", "output-dir": str(tmp_path)}
    grid = Watched.simulation(app, config, 6)
    result = run(grid, config, "in-process")
    fedavg, _ = federate(model="convnet-bn", method="fedavg")
    for name, array in fedavg.arrays.items():
        assert np.array_equal(result.arrays[name].numpy(), array.numpy()), name
    rates = result.arrays[RATES].numpy()
    assert rates.shape == (16,) and np.abs(rates).min() > 0
    names = {}
    for message in grid.seen:
        if message.metadata.message_type == "train":
            way = "up" if message.metadata.reply_to_message_id else "down"
            if way == "down":
                number = message.content["config"]["server-round"]
            names.setdefault((number, way), set(message.content["arrays"]))
    assert names[3, "down"] > names[3, "up"] == {RATES}
    assert names[4, "down"] == names[4, "up"] == {RATES}
    assert len(states(grid, "atp")) == 3
    assert json.loads((tmp_path / "summary.json").read_text())["best_round"] >= 3
    saved = load_file(tmp_path / "model.safetensors")[RATES]  # of the reported round
    bars = figures.rates(tmp_path).axes[0]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx(saved.tolist())
    labels = [label.get_text() for label in bars.get_yticklabels()]
    assert labels[0] == "conv1.weight" and labels[-1] == "norm2.running_var"
    federate(method="fedavg", rounds=1, **{"output-dir": str(tmp_path / "other")})
    with pytest.raises(ValueError, match="other has learnt no rates"):
        figures.rates(tmp_path / "other")


@pytest.mark.parametrize(("protect", "expected"), [(False, 20.0), (True, 3.0)])
def test_one_liar_decides_no_rate_with_protect(protect, expected):
    """Of 1, 2, 3, 4 and 90 the mean is 20, and without the least and the largest 3."""
    strategy = ATP(fedavg_rounds=1, protect=protect)
    strategy.now = Round(2)
    rates = [np.array([r], np.float32) for r in (1, 2, 3, 4, 90)]
    updates = [update(client, {RATES: alpha}) for client, alpha in enumerate(rates)]
    before = {"w": np.ones(1, np.float32), RATES: np.zeros(1, np.float32)}
    after = strategy.aggregate(before, updates)
    assert after[RATES].dtype == np.float32
    assert (after[RATES].tolist(), after["w"].tolist()) == ([expected], [1.0])
