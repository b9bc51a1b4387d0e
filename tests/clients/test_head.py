"""A network is split into features and head only if its outputs stay the same."""

import pytest
import torch
from torch import nn
from unusual_networks import (
    HeadIsFirst,
    LogProbabilities,
    NamedOutputs,
    Scaled,
    ViewFlattens,
    WithDropout,
)

from clients.models.foreign import adopted
from clients.models.head import headed
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
    with pytest.raises(ValueError, match=r"it has '\w+' \(64 → 24\), '\w+' \(24 → 10\)"):
        headed(kind(), "fedper", SHAPE, 10)
    network = kind()
    assert adopted(network, "own", SHAPE, 10) == (network, 10)


def test_of_several_outputs_the_logits_remain():
    network, classes = adopted(NamedOutputs(), "own", SHAPE)
    assert (network(torch.rand(3, *SHAPE)).shape, classes) == ((3, 10), 10)


def test_a_head_of_that_name_stays_where_it_is():
    network = MLP(SHAPE, 10)
    assert headed(network, "mlp", SHAPE, 10) is network


def test_a_head_that_was_found_is_found_without_a_trial(monkeypatch):
    """In a network of the same structure, not in one whose layers have other types or sizes."""
    known = {}
    headed(ViewFlattens(), "own", SHAPE, 10, known_heads=known)
    monkeypatch.setattr("clients.models.head.can_split", lambda *_: False)
    network = ViewFlattens()
    weight = network.fc.weight
    assert headed(network, "own", SHAPE, 10, known_heads=known).head.weight is weight
    for other, shape in ((HeadIsFirst(), SHAPE), (ViewFlattens(), (1, 9, 9))):
        with pytest.raises(ValueError, match="does not end in a linear layer"):
            headed(other, "own", shape, 10, known_heads=known)


def test_a_network_that_flattens_by_view_takes_samples():
    """They have the strides of a new tensor, also with one channel."""
    samples = Samples(torch.rand(6, *SHAPE), torch.zeros(6).long(), torch.arange(6), scale=1.0)
    x, _ = samples[:4]
    assert x.stride() == torch.empty(x.shape).stride()
    assert ViewFlattens()(x).shape == (4, 10)
    assert headed(ViewFlattens(), "own", SHAPE, 10).features(x).shape == (4, 144)


class Mixed(nn.Module):
    """Computes in bfloat16 as torch.autocast has it, its head too unless `apart`."""

    def __init__(self, apart=False):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.apart = apart

    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = self.first(x).relu()
            if not self.apart:
                return self.last(h).float()
        return self.last(h.float())


def test_a_head_within_autocast_is_refused_by_this_reason():
    """Behind the layer there is no further step, which the usual refusal would look for."""
    words = r"Mixed calls its layer 'last' within torch\.autocast, and auto .*; or choose a method"
    with pytest.raises(ValueError, match=words):
        headed(Mixed(), "auto", (4,), 3)
    words = (
        r"head is 'last', but Mixed calls its layer 'last' within torch\.autocast.*autocast out$"
    )
    with pytest.raises(ValueError, match=words):
        headed(Mixed(), "auto", (4,), 3, place="last")
    assert headed(Mixed(apart=True), "auto", (4,), 3).place == "last"
