"""The convolutional blocks of the target networks, on four pixels."""

import pytest
import torch
from torch import nn

from clients.models import build_model
from clients.models.networks import convolved


@pytest.mark.parametrize(("weight", "expected"), [(2.0, 8.0), (-1.0, 0.0)])
def test_a_block_is_convolution_pooling_relu(weight, expected):
    """[1, 2; 3, 4] times 2 has the maximum 8; times −1 it has −1, which ReLU cuts to 0."""
    layer = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert convolved(x, layer).tolist() == [[[[expected]]]]


def test_the_convnet_of_femnist():
    """fc 2048 takes 64·7·7 = 3136 activations and gives 2048."""
    net = build_model("convnet-2048", (1, 28, 28), 62, seed=0)
    assert net.fc.weight.shape == (2048, 3136) and net.head.weight.shape == (62, 2048)


def test_flattened_features_keep_the_order_of_channels():
    """Two channels of two pixels each, whatever their order in memory: c0 c0 c1 c1."""
    layer = nn.Conv2d(1, 2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 10.0]).reshape(2, 1, 1, 1))
    x = torch.tensor([1.0, 1.0, 2.0, 2.0]).expand(1, 1, 2, 4)
    assert convolved(x, layer).flatten(1).tolist() == [[1.0, 2.0, 10.0, 20.0]]
