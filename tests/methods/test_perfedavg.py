from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import share
from torch import nn
from torch.nn import functional as F

from clients.core.client import Client
from clients.methods.perfedavg import PerFedAvgClient

ALPHA = 0.3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches():
    generator = torch.manual_seed(1)
    x, x2 = torch.randn(2, 5, 3, dtype=torch.float64, generator=generator)
    return (x, torch.arange(5) % 2), (x2, (torch.arange(5) + 1) % 2)


def make(variant, **settings):
    (x, y), _ = batches()
    settings = {"inner_lr": ALPHA} | settings
    return PerFedAvgClient(network(), share(x, y), variant=variant, **settings)


def objective(model, d, d_prime):
    """F(w) = L_D'(w − α ∇L_D(w)) at the model's weights, written out on its own."""
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(F.cross_entropy(model(d[0]), d[1]), parameters)
    with torch.no_grad():
        for p, g in zip(parameters, gradient, strict=True):
            p.sub_(ALPHA * g)
        value = float(F.cross_entropy(model(d_prime[0]), d_prime[1]))
        for p, g in zip(parameters, gradient, strict=True):
            p.add_(ALPHA * g)
    return value


def finite_differences(d, d_prime, h=1e-5):
    model, found = network(), {}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter)
        for i in range(parameter.numel()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[i] += sign * h
                values.append(objective(model, d, d_prime))
                with torch.no_grad():
                    parameter.view(-1)[i] -= sign * h
            found[name].view(-1)[i] = (values[0] - values[1]) / (2 * h)
    return found


def test_exact_gradient_is_that_of_finite_differences():
    d, d_prime = batches()
    value, gradient = make("exact").meta_gradient(d, d_prime)
    assert value == pytest.approx(objective(network(), d, d_prime))
    for name, expected in finite_differences(d, d_prime).items():
        torch.testing.assert_close(gradient[name], expected, atol=1e-8, rtol=1e-5)


def test_hessian_free_approximates_it_and_first_order_does_not():
    d, d_prime = batches()
    _, exact = make("exact").meta_gradient(d, d_prime)
    _, free = make("hessian-free", delta=1e-4).meta_gradient(d, d_prime)
    _, first = make("first-order").meta_gradient(d, d_prime)
    for name in exact:
        torch.testing.assert_close(free[name], exact[name], atol=1e-7, rtol=1e-4)
    assert max(float((first[n] - exact[n]).abs().max()) for n in exact) > 1e-2


def test_first_order_is_the_gradient_at_the_moved_weights():
    d, d_prime = batches()
    model = network()
    parameters = list(model.parameters())
    step = torch.autograd.grad(F.cross_entropy(model(d[0]), d[1]), parameters)
    with torch.no_grad():
        for p, g in zip(parameters, step, strict=True):
            p.sub_(ALPHA * g)
    expected = torch.autograd.grad(F.cross_entropy(model(d_prime[0]), d_prime[1]), parameters)
    _, gradient = make("first-order").meta_gradient(d, d_prime)
    for found, wanted in zip(gradient.values(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("variant", ["exact", "first-order", "hessian-free"])
def test_without_an_inner_step_it_is_fedavg(variant):
    settings = {"local_steps": 3, "batch_size": 2, "lr": 0.2}
    (x, y), _ = batches()
    data = share(x, y)
    ours = PerFedAvgClient(network().float(), data, variant=variant, inner_lr=0.0, **settings)
    theirs = Client(network().float(), data, **settings)
    config = {"server-round": 1}
    one, other = (c.train(c.initial, config)[0] for c in (ours, theirs))
    for name, array in other.items():
        np.testing.assert_allclose(one[name], array, atol=1e-6)
        assert not np.array_equal(array, ours.initial[name])


def test_a_client_is_scored_after_one_step_on_its_training_data():
    """Loss on the validation rows at w − α∇L(w) of the others, written out; the state stays empty.
    A novel client that shows the others' labels makes the same step, once."""
    (x, y), _ = batches()
    data = share(x, y, validation=[0, 3])
    others = torch.tensor([i for i in range(len(y)) if i not in (0, 3)])
    data = replace(data, train=replace(data.train, index=others))
    expected = objective(network(), (x[others], y[others]), (x[[0, 3]], y[[0, 3]]))
    for own in (data, replace(data, everything=data.validation, novel=True, shots=1)):
        client = PerFedAvgClient(network().float(), own, inner_lr=ALPHA)
        loss, count, metrics = client.score(client.initial, {})
        assert loss == pytest.approx(expected)
        assert count == 2 and metrics["accuracy"] in (0.0, 0.5, 1.0)
        assert client.state == {}


def test_a_novel_client_that_shows_no_labels_makes_no_step():
    (x, y), _ = batches()
    client = PerFedAvgClient(network().float(), replace(share(x, y), novel=True), inner_lr=ALPHA)
    client.receive(client.initial, {})
    for name, array in client.initial.items():
        np.testing.assert_array_equal(client.model.state_dict()[name], array)


def test_a_step_of_training_takes_one_batch_inside_and_another_outside():
    """w ← w − β ∇F(w) with F(w) = L_D'(w − α ∇L_D(w)), D and D' drawn apart; one step, one
    sample each: that of finite differences over them, and of no other pair."""
    client = make("exact", lr=0.2, local_steps=1, batch_size=1)
    client.model.float()
    config, samples = {"server-round": 1}, client.share.train
    drawn = [client.rows(config, "inner"), client.rows(config)]
    assert drawn[0][0].tolist() != drawn[1][0].tolist()
    inner, outer = ((x.double(), y) for x, y in (samples[rows] for (rows,) in drawn))
    expected = finite_differences(inner, outer)
    client.train({}, config)
    for (name, one), start in zip(
        client.model.named_parameters(), network().parameters(), strict=True
    ):
        moved = (one - start).detach() / -0.2
        torch.testing.assert_close(moved, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["exact", "first-order", "hessian-free"])
def test_the_meta_gradient_is_clipped(variant):
    """One step of the rate 0.5 along a gradient that is clipped to 0.01 is 0.005 long."""
    (x, y), _ = batches()
    settings = {"lr": 0.5, "local_steps": 1, "batch_size": 5, "local_clip_norm": 0.01}
    one = PerFedAvgClient(network().float(), share(x.float(), y), variant=variant, **settings)
    trained, _, _ = one.train(one.shared(one.initial), {})
    moved = np.concatenate([(trained[n] - a).ravel() for n, a in one.initial.items()])
    assert np.linalg.norm(moved) == pytest.approx(0.005, rel=1e-3)
