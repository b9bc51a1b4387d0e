import math

import numpy as np
import pytest
import torch
from small_runs import share

from clients.methods.fedsr import FedSRClient
from clients.models import build_model
from partitions.datasets.loading import Info

INFO = Info("tiny", (1, 2, 2), 2, "")


def make(**settings):
    model = FedSRClient.build_network(build_model("mlp-small", INFO.shape, 2, 0), INFO)
    x, y = torch.randn(5, 1, 2, 2, generator=torch.manual_seed(0)), torch.arange(5) % 2
    return FedSRClient(model, share(x, y), **settings), x, y


def zeros(client):
    """Its network, the representation and the head being zero."""
    for layer in (client.model.representation, client.model.head):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return client.model


def test_loss_where_the_two_gaussians_differ():
    """m = (1, 2, 0, …), s = ½ in 100 dimensions; r(z|0) = N((3, 0, …), 2²), r(z|1) = N(0, 1):
    KL(p‖r) = 100 (ln 4 + ¼/8 − ½) + (2² + 2²)/8 for the three samples of class 0 and
    100 (ln 2 + ¼/2 − ½) + (1 + 4)/2 for the two of class 1; ‖z‖² = 5; a head of zeros: ln 2."""
    client, x, y = make(l2r=0.1, cmi=0.2)
    net = zeros(client).eval()
    with torch.no_grad():
        net.representation.bias[:2] = torch.tensor([1.0, 2.0])
        net.representation.bias[100:] = math.log(math.exp(0.5) - 1)
        net.reference_mean[0, 0] = 3.0
        net.reference_scale[0] = math.log(math.exp(2) - 1)
        net.reference_scale[1] = math.log(math.e - 1)
    zero = 100 * (math.log(4) + 0.25 / 8 - 0.5) + 1
    one = 100 * (math.log(2) + 0.25 / 2 - 0.5) + 2.5
    expected = math.log(2) + 0.1 * 5 + 0.2 * (3 * zero + 2 * one) / 5
    assert client.loss(x, y).item() == pytest.approx(expected, rel=1e-5)


def test_the_norm_is_that_of_the_sample():
    """m = 0 and s = 1 in 100 dimensions, z drawn as (2, …): ‖z‖² = 400, where ‖m‖² = 0."""
    client, x, y = make(l2r=0.01, cmi=0.0)
    net = zeros(client)
    net.sample = lambda mean, scale: mean + 2
    assert client.loss(x, y).item() == pytest.approx(math.log(2) + 4)


def test_samples_in_training_and_the_mean_in_evaluation():
    client, x, _ = make()
    net = client.model
    net.train()
    draws = torch.stack([net.features(x) for _ in range(4000)])
    mean, scale = net.distribution(x)
    torch.testing.assert_close(draws.mean(0), mean, atol=0.08, rtol=0)
    torch.testing.assert_close(draws.std(0), scale, atol=0.08, rtol=0)
    net.eval()
    torch.testing.assert_close(net.features(x), mean, atol=0, rtol=0)
    torch.testing.assert_close(client.predict(x), net.head(mean), atol=0, rtol=0)


def test_training_repeats_and_learns_all_its_parts():
    client, _, _ = make(local_steps=3)
    sent = client.initial
    parameters, config = list(sent.values()), {"names": "\n".join(sent), "server-round": 1}
    one, _, _ = client.fit(parameters, config)
    two, _, _ = client.fit(parameters, config)
    for name, a, b in zip(sent, one, two, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, sent[name]), name


def test_a_widened_layer_gives_mean_and_deviation():
    """784-200-400: the deviation is softplus of what ReLU leaves, at least softplus(0) = ln 2."""
    info = Info("tiny", (1, 28, 28), 10, "")
    base = build_model("mlp", info.shape, 10, 0)
    net = FedSRClient.build_network(base, info, representation="widened")
    assert [tuple(p.shape) for p in net.body.parameters()] == [
        (200, 784), (200,), (400, 200), (400,),
    ]  # fmt: skip
    assert (net.head.in_features, net.head.out_features) == (200, 10)
    mean, scale = net.distribution(torch.randn(50, 1, 28, 28, generator=torch.manual_seed(0)))
    assert mean.shape == scale.shape == (50, 200)
    assert mean.min() == 0 and scale.min().item() == pytest.approx(math.log(2))
    assert mean.max() > 0 and scale.max() > 0.7
    with pytest.raises(ValueError, match=r"'wide'.*widened"):
        FedSRClient.build_network(
            build_model("mlp", info.shape, 10, 0), info, representation="wide"
        )


def test_a_prediction_may_average_draws_by_hand(monkeypatch):
    """m = ½, s = 2 in the first of 100 dimensions, which alone the head sees, as the logits (z, 0);
    ±¾ is drawn, so z is 2 and -1: p(y = 0) is σ(2) and σ(-1), their mean 0.5748."""
    client, x, _ = make(test_samples=2)
    net = zeros(client).eval()
    with torch.no_grad():
        net.representation.bias[0] = 0.5
        net.representation.bias[100:] = math.log(math.exp(2) - 1)
        net.head.weight[0, 0] = 1.0
    draws = iter([0.75, -0.75])
    monkeypatch.setattr(torch, "randn_like", lambda s: torch.full_like(s, next(draws)))
    expected = (1 / (1 + math.exp(-2)) + 1 / (1 + math.exp(1))) / 2
    found = client.predict(x).exp()
    assert found[0].tolist() == pytest.approx([expected, 1 - expected])
    client.test_samples = 0
    assert client.predict(x)[0].tolist() == [0.5, 0.0]


def test_a_widened_convolution_gives_mean_and_deviation():
    """28×28 pixels: the second convolution has 128 channels of 7×7. The first 64 are the mean,
    and the others go through softplus. z has 64 · 49 = 3136 entries, and the hidden layer of
    512 stands above it. With weights 0 and biases 1 of the first 64 channels, −1 of the others, the
    mean is 1 and, after the ReLU, the deviation softplus(0) = ln 2."""
    info = Info("tiny", (1, 28, 28), 3, "")
    net = FedSRClient.build_network(
        build_model("convnet", info.shape, 3, 0), info, representation="widened-convolution"
    )
    assert net.body.conv2.weight.shape == (128, 32, 5, 5)
    with torch.no_grad():
        net.body.conv2.weight.zero_()
        net.body.conv2.bias[:64] = 1.0
        net.body.conv2.bias[64:] = -1.0
    x = torch.rand(2, 1, 28, 28)
    mean, scale = net.distribution(x)
    assert mean.shape == scale.shape == (2, 3136)
    assert (mean == 1).all()
    assert scale.detach().numpy() == pytest.approx(math.log(2))
    assert net.reference(torch.tensor([0, 2]))[0].shape == (2, 3136)
    net.eval()
    hidden = torch.relu(net.above[0](torch.ones(2, 3136)))
    torch.testing.assert_close(net(x), net.head(hidden))
    torch.testing.assert_close(net.classify(mean), net(x))
    with pytest.raises(ValueError, match="MLP is not a convnet; choose 'added' or 'widened'"):
        base = build_model("mlp", info.shape, 3, 0)
        FedSRClient.build_network(base, info, representation="widened-convolution")
