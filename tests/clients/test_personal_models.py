"""Ditto, APFL, FedALA, FedBABU and FedBN: a round of each by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import federate, share, states
from torch import nn

from clients.methods.apfl import APFLClient
from clients.methods.ditto import DittoClient
from clients.methods.fedala import FedALAClient, one_pass, top_layers, train_weights
from clients.methods.fedbabu import FedBABUClient
from clients.methods.fedbn import FedBNClient
from clients.models import build_model


class Squared(DittoClient):
    """L(w) = ½(w − 3)² on samples x = 1, y = 3."""

    def loss(self, x, y):
        return (self.model(x)[:, 0] - y).square().mean() / 2


def scalar(value):
    return {"weight": np.array([[value]], np.float32)}


def two(first, second):
    """The weights of two classes."""
    return {"weight": np.array([[first], [second]], np.float32)}


def logistic(cls, label, **settings):
    """Two classes on the one sample x = 1: logits are the weights."""
    model = nn.Linear(1, 2, bias=False)
    return cls(model, share(torch.ones(1, 1), [label], validation=[0]), **settings)


def values(arrays, name="weight"):
    return arrays[name].ravel().tolist()


def test_ditto_by_hand():
    """λ = ½, η = 0.1, weight decay 0.2, w = 1, v = 2:
    v → 2 − 0.1·((2 − 3) + ½(2 − 1) + 0.4) = 2.01 → 2.01 − 0.1·(−0.99 + ½·1.01 + 0.402) = 2.0183;
    w → 1 − 0.1·(−2 + 0.2) = 1.18 → 1.18 − 0.1·(−1.82 + 0.236) = 1.3384."""
    model = nn.Linear(1, 1, bias=False)
    samples = share(torch.ones(2, 1), torch.full((2,), 3.0))
    client = Squared(model, samples, penalty=0.5, lr=0.1, local_steps=2, weight_decay=0.2)
    client.state = {"own/weight": scalar(2.0)["weight"]}
    reply, _, _ = client.train(scalar(1.0), {})
    assert values(reply) == pytest.approx([1.3384])
    assert values(client.state, "own/weight") == pytest.approx([2.0183])
    client.receive(scalar(7.0), {})
    assert client.model.weight.item() == pytest.approx(2.0183)


def test_ditto_is_scored_by_w_until_it_trains():
    client = logistic(DittoClient, 0)
    client.receive(two(5.0, 1.0), {})
    assert client.model.weight.flatten().tolist() == [5.0, 1.0]


def test_dittos_personal_steps_have_batches_of_their_own():
    """Eight samples one by one: v's and w's draws are distinguished by their purposes."""
    model = nn.Linear(1, 1, bias=False)
    samples = share(torch.ones(8, 1), torch.arange(8.0))
    client = Squared(model, samples, lr=0.1, local_steps=8, batch_size=1)
    seen = []
    client.loss = lambda x, y: seen.append(int(y)) or model(x).square().mean()
    client.train(scalar(1.0), {"server-round": 1})
    assert sorted(seen[:8]) == sorted(seen[8:]) == list(range(8))
    assert seen[:8] != seen[8:]


def test_apfl_goes_on_with_its_own_mixing():
    """α = 0.9 of the last round, not the setting's ½; scored: v̄ = 0.9·(3, 1) + 0.1·(1, 2)."""
    client = logistic(APFLClient, 0, learn=False)
    client.state = {"own/weight": two(3.0, 1.0)["weight"], "mixing": np.array(0.9, np.float32)}
    client.receive(two(1.0, 2.0), {})
    assert client.model.weight.flatten().tolist() == pytest.approx([2.8, 1.1])
    _, _, metrics = client.train(two(0.0, 0.0), {})
    assert metrics["mixing"] == pytest.approx(0.9)
    assert client.state["mixing"] == pytest.approx(0.9)


@pytest.mark.parametrize("steps", [1, 2])
def test_apfl_by_hand(steps):
    """w = (0, 0), v = (ln 3, 0), α = ½, label 0, η = 0.2. v̄ = (½ ln 3, 0) has p_0 = √3/(1 + √3),
    so ∇F(v̄) = (−g, g), g = 1 − p_0. v → v + 0.2·½·(g, −g); w → (0.1, −0.1);
    α → ½ + 0.2·g·ln 3, in the first step alone."""
    client = logistic(APFLClient, 0, lr=0.2, local_steps=steps)
    client.state = {"own/weight": two(math.log(3), 0.0)["weight"]}
    client.state["mixing"] = np.array(0.5, np.float32)
    reply, _, metrics = client.train(two(0.0, 0.0), {})
    g = 1 - math.sqrt(3) / (1 + math.sqrt(3))
    alpha = 0.5 + 0.2 * g * math.log(3)
    assert metrics["mixing"] == pytest.approx(alpha)
    if steps == 1:
        assert values(reply) == pytest.approx([0.1, -0.1])
        assert values(client.state, "own/weight") == pytest.approx(
            [math.log(3) + 0.1 * g, -0.1 * g]
        )
    client.state["own/weight"] = two(4.0, 0.0)["weight"]
    client.receive(two(1.0, 2.0), {})
    mixture = [alpha * 4 + (1 - alpha), (1 - alpha) * 2]
    assert client.model.weight.flatten().tolist() == pytest.approx(mixture)


def test_apfl_keeps_its_mixing_within_bounds_or_as_it_is():
    """v is worse than w by far: α falls below 0 and stays at it. Without learning it stays."""
    for learn, expected in ((True, 0.0), (False, 0.9)):
        client = logistic(APFLClient, 0, lr=1.0, local_steps=1, mixing=0.9, learn=learn)
        client.state = {"own/weight": two(-9.0, 9.0)["weight"], "mixing": np.array(0.9, np.float32)}
        assert client.train(two(1.0, 0.0), {})[2]["mixing"] == pytest.approx(expected)


def test_fedala_learns_its_mixture_by_hand():
    """θ = (0.2, −0.1), w = (ln 3, 0), W = 1, label 1, η = ½: θ̂ = w has p_0 = ¾, ∇ = (¾, −¾),
    ∇_W = (¾(ln 3 − 0.2), −¾·0.1): W → (1 − ⅜(ln 3 − 0.2), 1), the second one clipped."""
    model = nn.Linear(1, 2, bias=False)
    model.weight.data = torch.tensor([[math.log(3)], [0.0]])
    theta = {"weight": torch.tensor([[0.2], [-0.1]])}
    batch = (torch.ones(1, 1), torch.tensor([1]))
    weight, loss = one_pass(model, theta, {"weight": torch.ones(2, 1)}, [batch], 0.5)
    first = 1 - 3 / 8 * (math.log(3) - 0.2)
    assert weight["weight"].flatten().tolist() == pytest.approx([first, 1.0])
    assert loss == pytest.approx(math.log(4))
    client = logistic(FedALAClient, 1, mixing_lr=0.5, local_steps=0, lr=0.1)
    client.state = {"own/weight": theta["weight"].numpy(), "mixing/weight": np.ones((2, 1), "f4")}
    reply, _, _ = client.train(two(math.log(3), 0.0), {})
    hat = [0.2 + (math.log(3) - 0.2) * first, 0.0]
    assert values(reply) == pytest.approx(hat, abs=1e-6)
    assert values(client.state, "own/weight") == pytest.approx(hat, abs=1e-6)
    client.receive(two(2.0, 1.0), {})  # with the W that was learnt, from the new θ
    expected = [hat[0] + (2 - hat[0]) * first, 1.0]
    assert client.model.weight.flatten().tolist() == pytest.approx(expected)


def test_fedala_learns_until_its_loss_settles():
    """At learning rate 0 no loss deviates: ten passes tell so."""

    class Counted(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    model, batches = nn.Linear(1, 2, bias=False), Counted([(torch.ones(1, 1), torch.tensor([1]))])
    weight = {"weight": torch.ones(2, 1)}
    train_weights(model, {"weight": torch.zeros(2, 1)}, weight, batches, 0.0, 100)
    assert batches.passes == 10
    names = top_layers(build_model("mlp-small", (1, 2, 2), 3, 0), 1, torch.zeros(1, 1, 2, 2))
    assert names == ["head.weight", "head.bias"]


def test_fedalas_weights_start_at_one_and_go_on_from_there(monkeypatch):
    """Ten samples in twos are five batches, 0.6 of them three. W starts at 1 (all of the server's)
    and is learnt in up to 100 passes, later from where it was and in one."""
    seen = []

    def watched(model, theta, weight, batches, lr, most, criterion):
        seen.append((theta["weight"].flatten().tolist(), weight["weight"].flatten().tolist()))
        seen.append(([len(y) for _, y in batches], lr, most))
        return {"weight": torch.full((2, 1), 0.25)}

    monkeypatch.setattr("clients.methods.fedala.train_weights", watched)
    samples = share(torch.ones(10, 1), [0] * 10)
    settings = {"mixing_share": 0.6, "mixing_lr": 0.7, "batch_size": 2, "lr": 0.0}
    client = FedALAClient(nn.Linear(1, 2, bias=False), samples, **settings)
    client.train(two(3.0, 2.0), {"server-round": 1})
    assert not seen  # it has no model of its own yet
    for _ in range(2):
        client.train(two(5.0, 6.0), {"server-round": 2})
    three = [2, 2, 2]
    assert seen == [
        ([3.0, 2.0], [1.0, 1.0]), (three, 0.7, 100),
        ([3.5, 3.0], [0.25, 0.25]), (three, 0.7, 1),  # θ̂ = 3 + (5 − 3)/4, 2 + (6 − 2)/4
    ]  # fmt: skip


def test_fedala_learns_in_training_mode_whatever_mode_the_network_was_left_in():
    """Half of the inputs are dropped at random, so the mode decides W. The one label is 1."""
    found, modes = [], []
    for left_in_training in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2, bias=False))
        samples = share(torch.tensor([[1.0, 2.0], [3.0, 5.0], [4.0, 1.0]]), [1, 1, 1])
        client = FedALAClient(model, samples, mixing_lr=0.01, lr=0.1, local_steps=2)
        client.state = {"own/1.weight": np.array([[0.2, -0.1], [0.3, 0.5]], np.float32)}
        model.register_forward_hook(lambda net, *_: modes.append(net.training))
        model.train(left_in_training)
        client.begin("train", {"server-round": 2})
        reply, _, _ = client.train({"1.weight": np.array([[1.0, 0.5], [-1, 2]], np.float32)}, {})
        found.append((reply["1.weight"].tolist(), client.state["mixing/1.weight"].tolist()))
    assert found[0] == found[1]
    assert modes.count(False) == 2 < len(modes)  # each client's look for the top layer


def test_fedala_leaves_out_a_mini_batch_of_one_sample():
    """Five samples in twos: 2, 2 and 1, which batch normalisation cannot train on. A client with
    one sample, whose network must do without batch normalisation, learns from it."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    samples = share(torch.arange(5.0)[:, None], [0, 1, 0, 1, 1])
    client = FedALAClient(model, samples, mixing_share=1.0, batch_size=2, local_steps=1)
    sizes = []

    def note(net, given, _):
        if net.training:
            sizes.append(len(given[0]))

    model.register_forward_hook(note)
    for _ in range(2):
        client.train(client.initial, {})
    assert set(sizes) == {2}
    client = logistic(FedALAClient, 1, local_steps=1)
    for _ in range(2):
        client.train(two(1.0, 0.0), {})
    assert "mixing/weight" in client.state


def test_fedala_looks_at_the_last_ten_losses_alone(monkeypatch):
    """100, then 0 for ever: eleven passes, whose first one is forgotten."""
    losses = iter([100.0] + [0.0] * 60)
    monkeypatch.setattr("clients.methods.fedala.one_pass", lambda *given: (given[2], next(losses)))
    train_weights(nn.Linear(1, 2), {}, {}, [], 0.0, 50)
    assert len(list(losses)) == 61 - 11


def test_fedbabu_tunes_for_as_many_epochs_as_it_says():
    """Four samples in twos, three epochs: six steps."""
    samples = share(torch.ones(4, 1), [0, 1, 0, 1])
    client = FedBABUClient(nn.Linear(1, 2), samples, batch_size=2, tune_epochs=3)
    steps, loss = [], client.loss
    client.loss = lambda x, y: steps.append(len(y)) or loss(x, y)
    client.receive({}, {})
    assert steps == [2] * 6


def test_fedbabu_trains_the_body_and_tunes_when_scored():
    """The head stays as it was; one epoch in one batch tunes it by −η (σ(hWᵀ + b) − onehot)ᵀ h/n,
    and no novel client is tuned."""
    x, y = torch.randn(6, 1, 2, 2, generator=torch.manual_seed(0)), torch.arange(6) % 3
    settings = {"lr": 0.5, "batch_size": 6, "local_steps": 1, "tune_epochs": 1, "part": "head"}
    client = FedBABUClient(build_model("mlp-small", (1, 2, 2), 3, 0), share(x, y), **settings)
    start = client.initial
    reply, _, _ = client.train({n: a for n, a in start.items() if not n.startswith("head.")}, {})
    assert not any(name.startswith("head.") for name in reply)
    assert not np.array_equal(reply["layers.0.weight"], start["layers.0.weight"])
    client.receive(reply, {})
    weight, bias = (torch.from_numpy(start[f"head.{n}"]) for n in ("weight", "bias"))
    h = torch.relu(
        x.flatten(1) @ torch.from_numpy(reply["layers.0.weight"]).T
        + torch.from_numpy(reply["layers.0.bias"])
    )
    slope = torch.softmax(h @ weight.T + bias, 1) - nn.functional.one_hot(y, 3)
    torch.testing.assert_close(client.model.head.weight.detach(), weight - 0.5 * slope.T @ h / 6)
    torch.testing.assert_close(
        client.model.layers[0].weight.detach(), torch.from_numpy(reply["layers.0.weight"])
    )
    object.__setattr__(client.share, "novel", True)
    client.receive(reply, {})
    torch.testing.assert_close(client.model.head.weight.detach(), weight)


def test_fedbn_estimates_a_novel_clients_statistics_before_it_learns():
    """Labeled inputs 1 and 3, others 5 and 15: mean 6, variance (25 + 9 + 1 + 81)/4 = 29. One step
    on the labeled ones, of mean 2 and variance 2: 0.9·6 + 0.1·2 = 5.6 and 0.9·29 + 0.1·2 = 26.3.
    The labels of the others are never used."""
    x = torch.tensor([[1.0], [3.0], [5.0], [15.0]])
    for hidden in (0, 1):
        whole = share(x, [0, 1, hidden, 1])
        few, others = (replace(whole.train, index=torch.tensor(i)) for i in ([0, 1], [2, 3]))
        novel = replace(whole, train=few, everything=others, novel=True, shots=1)
        for steps, expected in ((0, (6, 29)), (1, (5.6, 26.3))):
            model = FedBNClient.build(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)), None)
            client = FedBNClient(model, novel, novel_steps=steps)
            client.score(client.initial, {})
            norm = model[0].own_norm
            found = norm.running_mean.item(), norm.running_var.item()
            assert found == pytest.approx(expected)
            assert norm.momentum == 0.1 and not model.training


def test_fedbn_keeps_normalisation_on_the_client():
    changes = {"method": "fedbn", "model": "convnet-bn", "num-clients": 4, "rounds": 1}
    result, grid = federate(**changes)
    assert not any("norm" in name for name in result.arrays)
    kept = states(grid, "fedbn")
    name = "personal/norm1.own_norm.running_mean"
    means = [state[name] for state in kept.values()]
    assert len(means) == 2 and not np.array_equal(*means)
    with pytest.raises(ValueError, match="MLP has none; models that have it: convnet-bn"):
        federate(method="fedbn")
