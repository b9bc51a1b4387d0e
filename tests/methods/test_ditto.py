"""Ditto: a round by hand."""

import numpy as np
import pytest
import torch
from linear_clients import logistic, two_weights, values
from small_runs import share
from torch import nn

from clients.methods.ditto import DittoClient


class Squared(DittoClient):
    """L(w) = ½(w − 3)² on samples x = 1, y = 3."""

    def loss(self, x, y):
        return (self.model(x)[:, 0] - y).square().mean() / 2


def one_weight(value):
    return {"weight": np.array([[value]], np.float32)}


def test_ditto_by_hand():
    """λ = ½, η = 0.1, weight decay 0.2, w = 1, v = 2:
    v → 2 − 0.1·((2 − 3) + ½(2 − 1) + 0.4) = 2.01 → 2.01 − 0.1·(−0.99 + ½·1.01 + 0.402) = 2.0183;
    w → 1 − 0.1·(−2 + 0.2) = 1.18 → 1.18 − 0.1·(−1.82 + 0.236) = 1.3384."""
    model = nn.Linear(1, 1, bias=False)
    samples = share(torch.ones(2, 1), torch.full((2,), 3.0))
    client = Squared(model, samples, penalty=0.5, lr=0.1, local_steps=2, weight_decay=0.2)
    client.state = {"own/weight": one_weight(2.0)["weight"]}
    reply, _, _ = client.train(one_weight(1.0), {})
    assert values(reply) == pytest.approx([1.3384])
    assert values(client.state, "own/weight") == pytest.approx([2.0183])
    client.receive(one_weight(7.0), {})
    assert client.model.weight.item() == pytest.approx(2.0183)


def test_ditto_is_scored_by_w_until_it_trains():
    client = logistic(DittoClient, 0)
    client.receive(two_weights(5.0, 1.0), {})
    assert client.model.weight.flatten().tolist() == [5.0, 1.0]


def test_dittos_personal_steps_have_batches_of_their_own():
    """Eight samples one by one: v's and w's draws are distinguished by their purposes."""
    model = nn.Linear(1, 1, bias=False)
    samples = share(torch.ones(8, 1), torch.arange(8.0))
    client = Squared(model, samples, lr=0.1, local_steps=8, batch_size=1)
    seen = []
    client.loss = lambda x, y: seen.append(int(y)) or model(x).square().mean()
    client.train(one_weight(1.0), {"server-round": 1})
    assert sorted(seen[:8]) == sorted(seen[8:]) == list(range(8))
    assert seen[:8] != seen[8:]
