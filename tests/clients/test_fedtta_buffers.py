"""FedTTA on a network with batch normalisation and dropout."""

import numpy as np
import torch
from small_runs import share
from torch import nn

from clients.methods.fedtta import FedTTAProxClient
from clients.models.adaptable import Adaptable, Adaptation


class Counted(nn.Module):
    """Batch normalisation and dropout, as a target network may have them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(36, 4)

    def forward(self, x):
        return self.head(self.dropout(self.layers(x)))


def counted(**options):
    torch.manual_seed(0)
    model = Adaptable(Counted(), Adaptation(4, 6))
    own = {"local_steps": 3, "batch_size": 8, "lr": 0.1} | options
    data = share(torch.rand(20, 1, 8, 8), torch.arange(20) % 4, validation=range(20))
    return FedTTAProxClient(model, data, **own)


def test_buffers_and_dropout():
    """Running statistics count each mini-batch once; scoring draws nothing and changes nothing;
    training repeats exactly."""
    client = counted()
    arrays, config = client.initial, {"server-round": 1}
    reply = dict(zip(arrays, client.fit(list(arrays.values()), config)[0], strict=True))
    again = dict(zip(arrays, counted().fit(list(arrays.values()), config)[0], strict=True))
    assert all(np.array_equal(reply[name], again[name]) for name in arrays)
    assert reply["base.layers.1.num_batches_tracked"] == 3
    assert not np.array_equal(
        reply["base.layers.1.running_mean"], arrays["base.layers.1.running_mean"]
    )
    first = client.evaluate(list(reply.values()), config)
    assert client.evaluate(list(reply.values()), config) == first
    state = client.model.state_dict()
    assert all(np.array_equal(state[name].numpy(), reply[name]) for name in reply)


def test_a_single_sample_is_adapted_by_running_statistics():
    logits = counted().predict(torch.rand(1, 1, 8, 8))
    assert logits.shape == (1, 4) and logits.isfinite().all()
