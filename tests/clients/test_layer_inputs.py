"""A network may give a layer its input by keyword: what enters it is seen, and changes nothing."""

import pytest
import torch
from small_runs import share
from torch import nn

from clients.core.layer_inputs import before_calls
from clients.methods.auto import AutoClient
from clients.methods.bn_adapt import BNAdaptClient
from clients.methods.shot import SHOTClient
from clients.methods.tent import TENTClient

X = torch.rand(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


class Network(nn.Module):
    """Batch normalisation, then the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def features(self, x):
        return self.norm(x)

    def forward(self, x):
        return self.head(self.features(x))


class ByKeyword(Network):
    """The same; both layers get their input by keyword."""

    def features(self, x):
        return self.norm(input=x)

    def forward(self, x):
        return self.head(input=self.features(x))


def test_inputs_are_seen_until_the_handle_is_removed():
    seen = []
    layer = nn.Linear(4, 3)
    handle = before_calls(layer, seen.append)
    layer(X)
    layer(input=X[:2])
    handle.remove()
    layer(X)
    assert [len(x) for x in seen] == [24, 2]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(BNAdaptClient, {}), (TENTClient, {}), (SHOTClient, {"pseudo_weight": 0.5})],
)
def test_a_layer_that_is_called_by_keyword_adapts_as_by_position(kind, settings):
    predicted = []
    for network in (Network(), ByKeyword()):
        client = kind(network, share(X, Y), **settings)
        client.receive(client.initial, {})
        logits = client.predict(X * 3)
        predicted.append((logits, client.personal_model(X * 3)(X)))
    torch.testing.assert_close(predicted[1], predicted[0])


def test_auto_reads_a_layer_that_is_called_by_keyword():
    expected, by_keyword = (
        AutoClient(network, share(X, Y)).inner_values(X)[0] for network in (Network(), ByKeyword())
    )
    assert expected[:, :4].any()
    torch.testing.assert_close(by_keyword, expected)
