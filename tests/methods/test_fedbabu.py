"""FedBABU: a round by hand."""

import numpy as np
import torch
from small_runs import share
from torch import nn

from clients.methods.fedbabu import FedBABUClient
from clients.models import build_model


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
    settings = {"lr": 0.5, "tune_lr": 0.5, "batch_size": 6, "local_steps": 1, "tune_epochs": 1}
    settings["part"] = "head"
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


def test_fedbabu_tunes_at_a_rate_of_its_own():
    """One step of the head on one input of feature 2, from zeros: −tune_lr (σ(0) − onehot) h."""
    model = nn.Linear(1, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    settings = {"lr": 0.5, "tune_lr": 0.1, "batch_size": 1, "tune_epochs": 1}
    client = FedBABUClient(model, share(torch.full((1, 1), 2.0), [0]), **settings)
    client.receive({}, {})
    torch.testing.assert_close(client.model.weight.detach(), torch.tensor([[0.1], [-0.1]]))
