"""Encoders: invariance to the order of the inputs, shapes, bounded sensitivity."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.models import build_model
from clients.models.encoders import ENCODERS, AttentionBlock, MeanMax

IMAGES = ("lenet", (1, 16, 16)), ("convnet", (3, 8, 8))
FEATURES = ("mlp", (1, 8, 8)), ("mlp", (7,))


def make(name, model, shape, dim=5):
    torch.manual_seed(0)
    target = build_model(model, shape, 10, 0)
    return ENCODERS[name](target, shape, dim).double()


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(("model", "shape"), [*IMAGES, *FEATURES])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_order_of_the_inputs_does_not_matter(name, model, shape, data):
    n = data.draw(st.integers(1, 6))
    order = data.draw(st.permutations(range(n)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.rand(n, *shape, generator=generator, dtype=torch.float64)
    encoder = make(name, model, shape)
    with torch.no_grad():
        e, permuted = encoder(x), encoder(x[order])
    assert e.shape == (5,)
    torch.testing.assert_close(permuted, e, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(("model", "shape"), [IMAGES[0], FEATURES[1]])
def test_every_input_and_every_weight_counts(name, model, shape):
    """The gradient reaches all of γ and, for the mean of a set, each of its inputs."""
    encoder = make(name, model, shape)
    x = torch.rand(4, *shape, dtype=torch.float64, requires_grad=True)
    encoder(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in encoder.parameters())
    assert (x.grad.flatten(1).abs().sum(1) > 0).all()


def test_deep_sets_pools_half_by_mean_and_half_by_maximum():
    """The layer the identity: (1, 2), (3, 5) → mean of column 0, maximum of column 1."""
    pool = MeanMax(2, 2)
    with torch.no_grad():
        pool.fc.weight.copy_(torch.eye(2))
        pool.fc.bias.zero_()
    assert pool(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).tolist() == [2.0, 5.0]


def test_the_sensitivity_bound_is_attained():
    """φ(x) = (sgn x, 0, …): antipodal neighbours move the mean by exactly 2 √d / n."""
    encoder = make("ds-sphere", "mlp", (1,), dim=4)
    with torch.no_grad():
        for p in encoder.parameters():
            p.zero_()
        encoder.fc[0].weight[0, 0], encoder.fc[0].weight[1, 0] = 1.0, -1.0  # relu(x), relu(−x)
        encoder.out.weight[0, 0], encoder.out.weight[0, 1] = 1.0, -1.0
        x = torch.tensor([[2.0], [3.0], [0.5], [1.0]], dtype=torch.float64)
        y = x.clone()
        y[3] = -7.0
        assert encoder.sensitivity(4) == 2 * 4**0.5 / 4
        assert float((encoder(x) - encoder(y)).norm()) == pytest.approx(encoder.sensitivity(4))


def test_an_infinite_feature_counts_nothing():
    """φ(x) = (10¹⁵⁰ x, 0, …) is infinite for 10¹⁶⁰; the others have the direction 1. A NaN would
    tell a server that some input is large, and an error costs no budget."""
    encoder = make("ds-sphere", "mlp", (1,), dim=4)
    with torch.no_grad():
        for p in encoder.parameters():
            p.zero_()
        encoder.fc[0].weight[0, 0], encoder.fc[0].weight[1, 0] = 1e150, -1e150
        encoder.out.weight[0, 0], encoder.out.weight[0, 1] = 1.0, -1.0
        found = encoder(torch.tensor([[2.0], [1e160], [1.0], [-1e160]], dtype=torch.float64))
        assert found.tolist() == pytest.approx([2 * 2 / 4, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(("model", "shape"), [IMAGES[0], FEATURES[1]])
def test_a_set_and_its_double_are_described_alike(name, model, shape):
    """Everything is pooled by means, maxima or attention, and nothing by sums."""
    encoder, x = make(name, model, shape), torch.rand(3, *shape, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(encoder(torch.cat([x, x])), encoder(x), rtol=1e-9, atol=1e-11)


def test_the_mean_of_a_hidden_layer_of_200():
    """Units 0 and 1 hold ReLU(x) and ReLU(−x): 3·relu(x) − relu(−x) of (2, −4) has the mean 1."""
    encoder = make("mean-200", "mlp", (1,), dim=2)
    assert [p.shape for p in encoder.parameters()] == [(200, 1), (200,), (2, 200), (2,)]
    with torch.no_grad():
        for p in encoder.parameters():
            p.zero_()
        encoder.fc[0].weight[0, 0], encoder.fc[0].weight[1, 0] = 1.0, -1.0
        encoder.out.weight[1, 0], encoder.out.weight[1, 1] = 3.0, -1.0
        x = torch.tensor([[2.0], [-4.0]], dtype=torch.float64)
        assert encoder(x).tolist() == [0.0, 1.0]


def test_an_attention_block_adds_what_it_finds_to_what_it_is_given():
    """MAB: with attention 0 and rFF = ReLU(−2h + 3), x = 1 becomes h = 1, then 1 + 1 = 2; x = 4
    becomes 4 + 0. With attention at a constant 0.5 (its output's bias), x = 1 becomes h = 1.5 and
    stays, since −2·1.5 + 3 = 0."""
    block = AttentionBlock(2, 1)
    with torch.no_grad():
        block.fc.weight.copy_(-2 * torch.eye(2))
        block.fc.bias.fill_(3.0)
        block.attention.out_proj.weight.zero_()
        block.attention.out_proj.bias.zero_()
        x, y = torch.tensor([[1.0, 4.0]]), torch.rand(3, 2)
        assert block(x, y).tolist() == [[2.0, 4.0]]
        block.attention.out_proj.bias.fill_(0.5)
        assert block(x, y).tolist() == [[1.5, 4.5]]
