"""What a client reports as predictions is what the network that it delivers predicts, also where
running statistics are means: over parts of the inputs, calls of a layer, or single inputs."""

from copy import deepcopy

import pytest
import torch
from small_runs import share
from torch import nn

from clients.core.normalisation import NormCalls, batch_statistics, entropy, with_statistics
from clients.methods.fedtta import FedTTAClient, FedTTAPlusPlusClient
from clients.methods.shot import SHOTClient
from clients.methods.tent import TENTClient
from clients.models.adaptable import Adaptable, Adaptation

X = torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(0))
TEN_INPUTS = 10 * 36 * 4e-6  # megabytes
KINDS = (TENTClient, SHOTClient, FedTTAClient, FedTTAPlusPlusClient)


class Network(nn.Module):
    """Two convolutions, each before `norm`, which is called `calls` times in all."""

    def __init__(self, norm, calls=1):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.norm = norm
        self.head = nn.Linear(16, 3)
        self.calls = calls

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x)))
        h = self.second(h)
        if self.calls == 2:
            h = self.norm(h)
        return self.head(torch.relu(h).flatten(1))


class Halves(nn.BatchNorm2d):
    """Each half of a mini-batch is normalised by itself, as on two machines."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        return torch.cat([super(Halves, self).forward(half) for half in x.chunk(2)])


def with_common_statistics():
    """Two layers with the same buffers."""
    network = Network(nn.BatchNorm2d(4))
    other = nn.BatchNorm2d(4)
    other.running_mean = network.norm.running_mean
    other.running_var = network.norm.running_var
    network.second = nn.Sequential(network.second, other)
    return network


NETWORKS = {
    "once": lambda: Network(nn.BatchNorm2d(4)),
    "twice": lambda: Network(nn.BatchNorm2d(4), 2),
    "instances": lambda: Network(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "no statistics": lambda: Network(nn.InstanceNorm2d(4, affine=True)),
    "halves": lambda: Network(Halves(4)),
    "common statistics": with_common_statistics,
    "group": lambda: Network(nn.GroupNorm(2, 4), 2),
}


def client_of(kind, network, **settings):
    model = network
    if issubclass(kind, FedTTAClient):
        model = Adaptable(network, Adaptation(3, 4))
    client = kind(model, share(X, torch.arange(12) % 3), lr=0.05, **settings)
    client.receive(client.initial, {})
    return client


def flags(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("megabytes", [8.0, TEN_INPUTS])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_delivered_network_predicts_what_is_reported(kind, network, megabytes):
    """Of more inputs than fit into a pass as well. The client's model stays as it was."""
    client = client_of(kind, NETWORKS[network](), pass_megabytes=megabytes)
    before = deepcopy(client.model.state_dict())
    logits = client.predict(X)
    delivered = client.personal_model(X)
    torch.testing.assert_close(delivered(X), logits, rtol=1e-4, atol=1e-5)
    assert client.adaptation_metrics["entropy"] == pytest.approx(float(entropy(logits)), rel=1e-4)
    assert not any(flags(client.model)) and not any(flags(delivered))
    assert all(parameter.grad is None for parameter in client.model.parameters())
    torch.testing.assert_close(dict(client.model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [FedTTAClient, FedTTAPlusPlusClient])
def test_passes_of_an_adaptation_are_parts_too(kind):
    """`adapt-batch-size` also splits the inputs of a step."""
    client = client_of(kind, NETWORKS["once"](), adapt_batch_size=5)
    logits = client.predict(X)
    torch.testing.assert_close(client.personal_model(X)(X), logits, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_called_once_predicts_by_the_statistics_of_the_batch():
    """To the last bit, without the rounding of running statistics."""
    client = client_of(TENTClient, NETWORKS["once"](), adapt_steps=0)
    with torch.no_grad():
        expected = batch_statistics(NETWORKS["once"]())(X)
    assert torch.equal(client.predict(X), expected)


def test_statistics_of_a_layer_are_means_over_its_calls():
    """Inputs 1 and 3 are normalised to −1 and 1, then again: means 2 and 0, variances 1 and 1. The
    running statistics are mean 1 and variance 1, so 1 and 3 become 0 and 2, then −1 and 1."""
    norm = nn.BatchNorm1d(1, affine=False)
    network = nn.Sequential(norm, norm)
    calls = NormCalls(network)
    x = torch.tensor([[1.0], [3.0]])
    with calls.counted():
        batch_statistics(network)(x)
    assert not calls.kept_by_statistics(1)
    assert with_statistics(network, x)(x).flatten().tolist() == pytest.approx([-1, 1], rel=1e-4)
    assert (norm.running_mean.item(), norm.running_var.item()) == pytest.approx((1, 1), rel=1e-4)
    assert norm.momentum == 0.1
