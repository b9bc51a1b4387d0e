"""The target networks: their blocks on four pixels, their widths counted by hand."""

import os

import numpy as np
import pytest
import torch
from torch import nn

from clients.methods.fedma import resize
from clients.methods.pfl import Ensemble
from clients.models import build_model
from clients.models.adaptable import Adaptation
from clients.models.foreign import adopted
from clients.models.networks import MLP, convolved
from clients.models.registry import sized

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def test_a_network_is_probed_on_its_own_device():
    """As a user's may be on a GPU already; the device without values stands for it."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).to("meta")
    assert adopted(network, "own", (1, 2, 2)) == (network, 3)


def test_only_the_gpu_s_tests_see_a_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()


@pytest.mark.parametrize(("weight", "expected"), [(2.0, 8.0), (-1.0, 0.0)])
def test_a_block_is_convolution_pooling_relu(weight, expected):
    """[1, 2; 3, 4] times 2 has the maximum 8; times −1 it has −1, which ReLU cuts to 0."""
    layer = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert convolved(x, layer).tolist() == [[[[expected]]]]


def test_flattened_features_keep_the_order_of_channels():
    """Two channels of two pixels each, whatever their order in memory: c0 c0 c1 c1."""
    layer = nn.Conv2d(1, 2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 10.0]).reshape(2, 1, 1, 1))
    x = torch.tensor([1.0, 1.0, 2.0, 2.0]).expand(1, 1, 2, 4)
    assert convolved(x, layer).flatten(1).tolist() == [[1.0, 2.0, 10.0, 20.0]]


@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [  # each layer's inputs, with one for its bias, times its outputs
        ("mlp", (1, 28, 28), [(785, 200), (201, 200), (201, 7)]),
        ("mlp-small", (1, 28, 28), [(785, 100), (101, 7)]),
        ("mlp-big", (1, 28, 28), [(785, 400), (401, 400), (401, 7)]),
        ("softmax", (5,), [(6, 7)]),
        ("convnet", (1, 28, 20), [(26, 32), (801, 64), (64 * 7 * 5 + 1, 512), (513, 7)]),
        ("convnet-2048", (1, 28, 28), [(26, 32), (801, 64), (64 * 49 + 1, 2048), (2049, 7)]),
        ("convnet-small", (3, 8, 8), [(76, 16), (401, 32), (32 * 4 + 1, 512), (513, 7)]),
        ("convnet-big", (3, 8, 8), [(76, 64), (1601, 128), (128 * 4 + 1, 512), (513, 7)]),
        ("convnet-bn", (3, 4, 4), [(76, 32), (2, 32), (801, 64), (2, 64), (65, 512), (513, 7)]),
        ("convnet-atp", (1, 8, 8),
         [(9, 32), (2, 32), (288, 64), (2, 64), (576, 64), (2, 64), (257, 64), (2, 64), (65, 7)]),
        ("convnet-atp", (3, 28, 20), [(27, 32), (2, 32), (288, 64), (2, 64), (576, 64), (2, 64),
                                      (64 * 35 + 1, 64), (2, 64), (65, 7)]),
        # sides 32 and 28 are 28 and 24, 14 and 12, 10 and 8, 5 and 4
        ("lenet", (3, 32, 28), [(76, 16), (401, 32), (32 * 20 + 1, 120), (121, 84), (85, 7)]),
        ("lenet-small", (3, 32, 32), [(76, 8), (201, 16), (16 * 25 + 1, 120), (121, 84), (85, 7)]),
        ("lenet-big", (3, 32, 32), [(76, 32), (801, 64), (64 * 25 + 1, 120), (121, 84), (85, 7)]),
        # sides 28, 14, 7, 3, 1
        ("omniglot-lenet", (1, 28, 28),
         [(10, 16), (145, 32), (289, 64), (577, 64), (65, 84), (85, 7)]),
        ("feature-mlp", (1280,), [(1281, 500), (501, 500), (501, 7)]),
        # maps larger than 7×7 are pooled to it
        ("preference-net", (2, 40, 24), [(51, 16), (401, 32), (32 * 7 * 6 + 1, 128), (129, 7)]),
    ],
)  # fmt: skip
def test_the_networks_are_as_wide_as_the_papers_have_them(name, shape, layers):
    """Every weight counted by hand; each layer is asked once, and but for the first one and for
    normalisation it sees what was rectified."""
    net, asked = build_model(name, shape, 7, seed=3).eval(), []
    assert sum(p.numel() for p in net.parameters()) == sum(a * b for a, b in layers)
    for layer in (m for m in net.modules() if list(m.parameters(recurse=False))):
        layer.register_forward_pre_hook(lambda layer, x: asked.append((layer, float(x[0].min()))))
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert net(x).shape == (4, 7)
        seen = list(asked)
        assert torch.equal(net(x), net.head(net.features(x)))
    assert len({layer for layer, _ in seen}) == len(seen) == len(layers)
    deeper = [least for layer, least in seen[1:] if not isinstance(layer, NORMS)]
    assert deeper == [0.0] * len(deeper)  # of many rectified units some are off


def test_every_hidden_layer_of_an_mlp_is_rectified():
    """x = 1: −2 is cut to 0, so the second layer's −1 comes from its bias and is cut, too."""
    net = MLP((1,), 1, hidden=(1, 1))
    with torch.no_grad():
        for layer, weight, bias in zip([*net.layers, net.head], (-2, 5, 1), (0, 3, 4), strict=True):
            layer.weight.fill_(weight)
            layer.bias.fill_(bias)
    assert net(torch.ones(1, 1)).item() == 5 * 0 + 3 + 4
    assert net(-torch.ones(1, 1)).item() == 5 * 2 + 3 + 4


def test_a_fifth_of_the_features_is_dropped_in_training_alone():
    net = build_model("feature-mlp", (30,), 3, seed=0)
    x = torch.rand(200, 30)
    on = net.eval().features(x)
    torch.manual_seed(0)
    kept = (net.train().features(x) > 0)[on > 0].float().mean().item()
    assert kept == pytest.approx(0.8, abs=0.01)
    assert torch.equal(net.eval().features(x), on)


def test_a_networks_start_is_its_seeds():
    """Whatever was drawn before, and without a trace in torch's generator."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = (build_model("softmax", (3,), 2, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)


def test_sizes_are_names_of_networks():
    named = [sized("lenet", size) for size in ("small", "medium", "big", "mlp")]
    assert named == ["lenet-small", "lenet", "lenet-big", "mlp"]


def test_the_adaptation_network_by_hand():
    """C-w-w-w-1: with weights 1 and biases −1, logits (2, 3) and w = 2 give 4, 2·4 − 1 = 7 and 13
    in both units, and 2·13 − 1 = 25; of (−2, 1) the first layer's −2 is cut to 0, and so on, but
    not the last −1."""
    net = Adaptation(2, 2)
    for name, parameter in net.named_parameters():
        nn.init.constant_(parameter, -1.0 if name.endswith("bias") else 1.0)
    assert net(torch.tensor([[2.0, 3.0], [-2.0, 1.0]])).tolist() == [[25.0], [-1.0]]


def test_an_ensemble_is_the_mean_of_its_members_logits():
    members = [nn.Linear(1, 2, bias=False) for _ in range(2)]
    for member, weights in zip(members, ([[1.0], [2.0]], [[5.0], [-4.0]]), strict=True):
        member.weight.data = torch.tensor(weights)
    assert Ensemble(members)(torch.tensor([[3.0]])).tolist() == [[9.0, -3.0]]


def test_layers_get_the_sizes_of_the_arrays():
    """A convolution and a linear layer wider, a bias left out of it; what has its size stays."""
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Flatten(), nn.Linear(3, 4), nn.Linear(4, 2))
    last = net[3].weight
    shapes = {"0.weight": (5, 2, 1, 1), "0.bias": (5,), "2.weight": (4, 5), "3.bias": (2,)}
    resize(net, {name: np.zeros(shape) for name, shape in shapes.items()})
    assert (net[0].out_channels, net[0].in_channels) == (5, 2)
    assert (net[2].out_features, net[2].in_features) == (4, 5)
    assert net[3].weight is last and net(torch.zeros(1, 2, 1, 1)).shape == (1, 2)
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(5, 2, 3, 3\)"):
        resize(net, {"0.weight": np.zeros((5, 2, 3, 3))})


def test_preference_nets_maps_are_max_pooled_to_7_by_7():
    """Of 56 × 56 pixels come 28 × 28 maps of the second convolution: the maximum of every 4 × 4."""
    net, seen = build_model("preference-net", (1, 56, 56), 3, 0), {}
    net.conv2.register_forward_hook(lambda _, inputs, out: seen.update(maps=out))
    net.fc.register_forward_pre_hook(lambda _, inputs: seen.update(pooled=inputs[0]))
    net(torch.randn(2, 1, 56, 56))
    blocks = seen["maps"].relu().reshape(2, 32, 7, 4, 7, 4).amax((3, 5))
    assert seen["pooled"].equal(blocks.flatten(1))
