"""A network is split into features and head only if its outputs stay the same."""

import pytest
import torch
from support_networks import (
    HeadIsFirst,
    LogProbabilities,
    NamedOutputs,
    Scaled,
    ViewFlattens,
    WithDropout,
)
from torch import nn

from clients.models.head import fitted, headed
from clients.models.networks import MLP
from partitions.shares import Samples

SHAPE = (1, 8, 8)


def outputs(network, x, *, training):
    torch.manual_seed(3)
    with torch.no_grad():
        return network.train(training)(x)


@pytest.mark.parametrize(
    ("kind", "head"),
    [(ViewFlattens, "fc"), (HeadIsFirst, "classifier"), (WithDropout, "out")],
)
def test_the_head_is_the_layer_whose_outputs_the_network_gives(kind, head):
    """Whatever its name and wherever it was registered; both forms give the same outputs."""
    network = kind()
    weight = network.get_submodule(head).weight.detach().clone()
    x = torch.rand(5, *SHAPE)
    before = [outputs(network, x, training=training) for training in (False, True)]
    network = kind() if kind is WithDropout else network  # its statistics have moved
    if kind is WithDropout:
        weight = network.get_submodule(head).weight.detach().clone()
        before = [outputs(headed(kind(), "own", SHAPE, 10), x, training=False)]
        assert before[0].shape == (5, 10)
    split = headed(network, "own", SHAPE, 10)
    assert torch.equal(split.head.weight, weight)
    if kind is not WithDropout:
        for training, expected in zip((False, True), before, strict=True):
            torch.testing.assert_close(outputs(split, x, training=training), expected)


@pytest.mark.parametrize("kind", [LogProbabilities, Scaled])
def test_what_stands_behind_the_last_layer_is_not_lost(kind):
    """Such a network has no head: the sentence names its layers. As it is, it stays itself."""
    with pytest.raises(ValueError, match=r"linear layers: '\w+' \(64 to 24\), '\w+' \(24 to 10\)"):
        headed(kind(), "own", SHAPE, 10)
    network = kind()
    assert fitted(network, "own", SHAPE, 10) is network


def test_outputs_that_are_no_tensor_are_refused():
    with pytest.raises(ValueError, match="gives a dict; a network must give one tensor of logits"):
        fitted(NamedOutputs(), "own", SHAPE, 10)


def test_a_head_of_that_name_stays_where_it_is():
    network = MLP(SHAPE, 10)
    assert headed(network, "mlp", SHAPE, 10) is network
    own = nn.Sequential()
    own.add_module("flat", nn.Flatten())
    own.add_module("head", nn.Linear(64, 10))
    assert headed(own, "own", SHAPE, 10) is own


def test_a_network_from_outside_gets_the_strides_of_a_new_tensor():
    """Samples of one channel come in the strides of channels last; `view` needs the usual ones."""
    samples = Samples(torch.rand(6, *SHAPE), torch.zeros(6).long(), torch.arange(6), scale=1.0)
    x, _ = samples[:4]
    assert x.stride() != torch.empty(x.shape).stride()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        ViewFlattens()(x)
    network = ViewFlattens()
    for _ in range(2):  # a function may give the same network again
        assert fitted(network, "own", SHAPE, 10)(x).shape == (4, 10)
        assert len(network._forward_pre_hooks) == 1
    assert headed(network, "own", SHAPE, 10).features(x).shape == (4, 144)
