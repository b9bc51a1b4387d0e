"""FedALA: a round by hand."""

import math

import numpy as np
import pytest
import torch
from linear_clients import logistic, two_weights, values
from small_runs import share
from torch import nn
from torch.nn import functional as F

from clients.methods.fedala import FedALAClient, one_pass, top_layers, train_weights
from clients.models import build_model


def test_fedala_learns_its_mixture_by_hand():
    """θ = (0.2, −0.1), w = (ln 3, 0), W = 1, label 1, η = ½: θ̂ = w has p_0 = ¾, ∇ = (¾, −¾),
    ∇_W = (¾(ln 3 − 0.2), −¾·0.1): W → (1 − ⅜(ln 3 − 0.2), 1), the second one clipped."""
    model = nn.Linear(1, 2, bias=False)
    model.weight.data = torch.tensor([[math.log(3)], [0.0]])
    theta = {"weight": torch.tensor([[0.2], [-0.1]])}
    batch = (torch.ones(1, 1), torch.tensor([1]))
    weight, loss = one_pass(
        model, theta, {"weight": torch.ones(2, 1)}, [batch], 0.5, F.cross_entropy
    )
    first = 1 - 3 / 8 * (math.log(3) - 0.2)
    assert weight["weight"].flatten().tolist() == pytest.approx([first, 1.0])
    assert loss == pytest.approx(math.log(4))
    client = logistic(FedALAClient, 1, mixing_lr=0.5, local_steps=0, lr=0.1)
    client.state = {"own/weight": theta["weight"].numpy(), "mixing/weight": np.ones((2, 1), "f4")}
    reply, _, _ = client.train(two_weights(math.log(3), 0.0), {})
    hat = [0.2 + (math.log(3) - 0.2) * first, 0.0]
    assert values(reply) == pytest.approx(hat, abs=1e-6)
    assert values(client.state, "own/weight") == pytest.approx(hat, abs=1e-6)
    client.receive(two_weights(2.0, 1.0), {})  # with the W that was learnt, from the new θ
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
    train_weights(model, {"weight": torch.zeros(2, 1)}, weight, batches, 0.0, 100, F.cross_entropy)
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
    client.train(two_weights(3.0, 2.0), {"server-round": 1})
    assert not seen  # it has no model of its own yet
    for _ in range(2):
        client.train(two_weights(5.0, 6.0), {"server-round": 2})
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
        client.train(two_weights(1.0, 0.0), {})
    assert "mixing/weight" in client.state


def test_fedala_looks_at_the_last_ten_losses_alone(monkeypatch):
    """100, then 0 for ever: eleven passes, whose first one is forgotten."""
    losses = iter([100.0] + [0.0] * 60)
    monkeypatch.setattr("clients.methods.fedala.one_pass", lambda *given: (given[2], next(losses)))
    train_weights(nn.Linear(1, 2), {}, {}, [], 0.0, 50, F.cross_entropy)
    assert len(list(losses)) == 61 - 11
