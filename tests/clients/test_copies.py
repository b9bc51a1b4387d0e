"""A copy of a network that has kept what its last forward pass computed."""

import pytest
import torch
from torch import nn

from clients.core.copies import copy_of


class Keeping(nn.Module):
    """Features in an attribute, in nested ones, and in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.nested = []
        self.register_buffer("level", torch.zeros(2))

    def forward(self, x):
        h = self.layer(x)
        self.features = h
        self.nested = [{"features": (h, self.nested)}]
        self.nested.append(self.nested)
        self.level = self.level + h.mean(0)
        return h


def test_a_copy_has_the_values_of_what_was_computed_and_no_common_memory():
    network = Keeping()
    network(torch.ones(4, 3)).sum().backward()
    copy = copy_of(network)
    assert torch.equal(copy.features, network.features) and not copy.features.requires_grad
    assert torch.equal(copy.level, network.level) and "level" in dict(copy.named_buffers())
    assert copy.nested[0]["features"][0] is copy.features
    assert copy.nested[1] is copy.nested
    with torch.no_grad():
        copy.level += 1
        copy.features += 1
        copy.layer.weight += 1
    assert not torch.isclose(copy.level, network.level).any()
    assert not torch.isclose(copy.features, network.features).any()
    assert not torch.isclose(copy.layer.weight, network.layer.weight).any()
    assert copy.layer.weight.requires_grad


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_a_hook_computes_is_copied():
    """Torch's older weight norm computes it before each pass."""
    layer = nn.utils.weight_norm(nn.Linear(3, 2))
    x = torch.rand(4, 3)
    expected = layer(x)
    copy = copy_of(layer)
    assert torch.equal(copy(x), expected)
    with torch.no_grad():
        copy.weight_g *= 2
    assert not torch.allclose(copy(x), expected)
