"""Trained clients of methods that mix two heads."""

import torch
from small_runs import share
from torch import nn

from clients.core.arrays import model_arrays
from clients.methods.fedthe import FedTHEClient
from clients.methods.fedthe_plus import FedTHEPlusClient
from clients.models import build_model
from clients.models.head import HeadedNetwork
from partitions.datasets.loading import described

INFO = described({"dataset": "digits", "data-dir": ""})
X = torch.rand(24, 1, 8, 8, generator=torch.manual_seed(5))


Y = torch.arange(24) % 5 % 3  # 10, 9 and 5 samples of three classes


class Plain(HeadedNetwork):
    """Features are the inputs; dropout, which only training shows."""

    def __init__(self, width=2):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(width, 2)

    def features(self, x):
        return self.drop(x)


def two_heads(cls=FedTHEClient, name="mlp-small", **settings):
    """A trained training client, and the arrays that the server sends it."""
    model = cls.build(build_model(name, (1, 8, 8), 3, 0), INFO)
    client = cls(model, share(X, Y), **{"views": 3} if cls is FedTHEPlusClient else {}, **settings)
    client.begin("train", {})
    sent, *_ = client.train(model_arrays(model), {"server-round": 1})
    return client, sent


def view_settings():
    return {"views": 3, "crop_share": 0.125, "flips": False}
