import copy
import math

import numpy as np
import pytest
import torch
from small_runs import share

from clients.core.client import Client
from clients.methods.fedadg import FedADGClient
from clients.models import build_model
from partitions.datasets.loading import Info

INFO = Info("tiny", (1, 2, 2), 2, "")


def build():
    torch.manual_seed(0)
    base = build_model("mlp-small", INFO.shape, 2, 0)
    return FedADGClient.build_network(base, INFO, feature_dim=6, noise_dim=3)


def make(cls=FedADGClient, **settings):
    x, y = torch.randn(8, 1, 2, 2, generator=torch.manual_seed(0)), torch.arange(8) % 2
    return cls(build(), share(x, y), local_steps=2, batch_size=4, **settings), x, y


def parts_that_differ(one, other):
    return {name.partition(".")[0] for name in one if not np.array_equal(one[name], other[name])}


class FirstFeature(torch.nn.Module):
    """D(h|y) = h_0, so that every probability is given."""

    def forward(self, features, onehot):
        return features[:, 0]


def test_losses_where_features_and_reference_differ():
    """D(h) = (0.2, 0.6), D(h') = (0.9, 0.4): L_D = mean(0.1² + 0.2², 0.6² + 0.6²) = 0.385,
    L_G = mean(0.9², 0.4²) = 0.485, adversarial mean(0.8², 0.4²) = 0.4, with a head of zeros
    0.3·0.4 + 0.7·ln 2."""
    client, _, _ = make(alignment=0.3)
    client.model.discriminator = FirstFeature()
    torch.nn.init.zeros_(client.model.head.weight)
    torch.nn.init.zeros_(client.model.head.bias)
    h, reference = torch.zeros(2, 6), torch.zeros(2, 6)
    h[:, 0], reference[:, 0] = torch.tensor([0.2, 0.6]), torch.tensor([0.9, 0.4])
    y, onehot = torch.tensor([0, 1]), torch.eye(2)
    assert client.discriminator_loss(h, reference, onehot).item() == pytest.approx(0.385)
    assert client.generator_loss(reference, onehot).item() == pytest.approx(0.485)
    predictor = client.predictor_loss(h, y, onehot).item()
    assert predictor == pytest.approx(0.3 * 0.4 + 0.7 * math.log(2))


def test_a_step_written_out():
    """D descends first; features and classifier see the new D, and so does G, whose reference is
    the one that D was trained on. One batch of all samples, the noise drawn again."""
    client, x, y = make(adversarial_lr=0.2, lr=0.3, alignment=0.4)
    client.local_steps, client.batch_size = 1, len(y)
    net = copy.deepcopy(client.model)
    order = client.rows({"server-round": 1})[0]
    torch.manual_seed(5)
    noise = torch.rand(8, 3)
    onehot = torch.eye(2)[y[order]]
    d, h = net.discriminator, net.features(x[order])
    reference = net.generator(noise, onehot)

    def descend(loss, parameters, rate):
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(rate * gradient)

    reported_apart = (1 - d(reference.detach(), onehot)) ** 2 + d(h.detach(), onehot) ** 2
    descend(reported_apart.mean(), list(d.parameters()), 0.2)
    task = -torch.log_softmax(net.head(h), 1)[torch.arange(8), y[order]].mean()
    loss = 0.4 * ((1 - d(h, onehot)) ** 2).mean() + 0.6 * task
    descend(loss, [*net.body.parameters(), *net.feature.parameters(), *net.head.parameters()], 0.3)
    descend((d(reference, onehot) ** 2).mean(), list(net.generator.parameters()), 0.2)
    shared = {n: a for n, a in client.initial.items() if not n.startswith("discriminator.")}
    torch.manual_seed(5)
    reply, n, metrics = client.train(shared, {"server-round": 1})
    found = reply | {k.removeprefix("personal/"): a for k, a in client.state.items()}
    for name, tensor in net.state_dict().items():
        np.testing.assert_allclose(found[name], tensor.numpy(), atol=1e-6, err_msg=name)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert n == 8


def test_without_alignment_the_predictor_is_fedavgs():
    """The same local steps of cross entropy on body, feature layer and head."""
    ours, _, _ = make(alignment=0.0, adversarial_lr=0.0)
    theirs, _, _ = make(Client)
    one, other = ours.train(ours.initial, {})[0], theirs.train(theirs.initial, {})[0]
    assert parts_that_differ(one, ours.initial) == {"body", "feature", "head"}
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], atol=1e-7)


@pytest.mark.parametrize("part", ["predictor", "discriminator", "generator"])
def test_the_gradient_of_each_step_is_clipped(part):
    """One mini-batch, all three rates 0.5, clipped to 0.001: each network moves by 0.0005."""
    one, _, _ = make(lr=0.5, adversarial_lr=0.5, local_clip_norm=0.001)
    one.local_steps = 1
    one.train(one.shared(one.initial), {})
    names = {"predictor": ("body.", "feature.", "head.")}.get(part, (f"{part}.",))
    trained = one.model.state_dict()
    moved = [
        trained[n] - torch.from_numpy(a) for n, a in one.initial.items() if n.startswith(names)
    ]
    assert sum(float(m.square().sum()) for m in moved) ** 0.5 == pytest.approx(0.0005, rel=1e-2)
