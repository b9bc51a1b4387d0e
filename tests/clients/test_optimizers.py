"""The optimizers against torch's classes, bit for bit."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from clients.core.sgd import SGD, Adam

FUSED_ADAM, FUSED_SGD = (
    functools.partial(cls, fused=True) for cls in (torch.optim.Adam, torch.optim.SGD)
)
PAIRS = [
    (SGD, torch.optim.SGD, {}),
    (SGD, FUSED_SGD, {"weight_decay": 0.01}),
    (SGD, FUSED_SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (Adam, FUSED_ADAM, {}),
    (Adam, FUSED_ADAM, {"weight_decay": 0.01}),
]


def network():
    """Two layers, the second unused until it gets a gradient."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])


def trained(make, options, own=None):
    own = own or {}
    net = network()
    groups = [
        {"params": list(net[0].parameters())},
        {"params": list(net[1].parameters()), "lr": 0.5} | own,
    ]
    optimizer = make(groups, lr=0.1, **options)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.full((4, 3), 1.0 + step)
        loss = net[0](x).square().sum() + (net[1](x).square().sum() if step > 1 else 0.0)
        loss.backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
def test_the_steps_are_torch_s(ours, theirs, options):
    for one, two in zip(trained(ours, options), trained(theirs, options), strict=True):
        assert torch.equal(one, two)


def test_a_group_may_have_a_momentum_of_its_own():
    own = {"momentum": 0.8}
    for options in ({}, {"momentum": 0.5, "weight_decay": 0.01}):
        pairs = zip(trained(SGD, options, own), trained(FUSED_SGD, options, own), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)


def test_a_step_may_be_shortened():
    """p = 1, gradient 2: at a quarter of the rates 0.1 and 0.5 the groups move by 0.05 and 0.25."""
    p, q = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0]))
    optimizer = SGD([{"params": [p]}, {"params": [q], "lr": 0.5}], lr=0.1)
    (p.square() + q.square()).sum().backward()
    optimizer.step(0.25)
    assert (p.item(), q.item()) == (pytest.approx(0.95), pytest.approx(0.75))


def test_an_sgd_step_by_hand():
    """Weight decay 0.5, momentum 0.9, rate 0.1, p = 2, gradients 1 and 3: b = 1 + 0.5·2 = 2 and
    p = 1.8; b = 0.9·2 + 3 + 0.5·1.8 = 5.7 and p = 1.23."""
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = SGD([p], 0.1, 0.9, 0.5)
    for gradient in (1.0, 3.0):
        p.grad = torch.tensor([gradient])
        optimizer.step()
    assert p.item() == pytest.approx(1.23)


@pytest.mark.parametrize("make", [lambda p: SGD([p], 0.1, 0.9, 0.1), lambda p: Adam([p], 0.1)])
def test_strides_change_nothing(make):
    """Of the parameter, the gradient, and a loaded state."""
    plain, last = torch.contiguous_format, torch.channels_last
    found = []
    for of_p, of_g in ((plain, plain), (plain, last), (last, plain), (last, last)):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(2, 3, 4, 5).contiguous(memory_format=of_p))
        optimizer = make(p)
        for _ in range(2):
            p.grad = torch.randn(2, 3, 4, 5).contiguous(memory_format=of_g)
            optimizer.step()
            other = make(p)
            arrays = [{n: np.ascontiguousarray(a) for n, a in s.items()} for s in optimizer.state()]
            other.load_state(arrays)
            optimizer = other
        found.append(p.detach())
    assert all(torch.equal(found[0], p) for p in found[1:])


@pytest.mark.parametrize(
    "make", [lambda p: SGD(p, 0.1), lambda p: SGD(p, 0.1, 0.9), lambda p: Adam(p, 0.1)]
)
def test_sparse_gradients_are_as_dense_ones(make):
    tables = []
    for sparse in (True, False):
        torch.manual_seed(0)
        layer = nn.Embedding(5, 3, sparse=sparse)
        optimizer = make(layer.parameters())
        for rows in ([0, 2, 2], [1, 2]):
            optimizer.zero_grad()
            layer(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
        tables.append(layer.weight.detach())
    torch.testing.assert_close(*tables)


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, 0.9), lambda p: Adam(p, 0.1)])
def test_who_takes_over_a_state_goes_on_as_the_other_did(make):
    """Momenta, moments and the number of steps: the third step of a successor is the third one."""

    def steps(optimizer, p, gradients):
        for gradient in gradients:
            p.grad = torch.tensor(gradient)
            optimizer.step()
        return p

    first = nn.Parameter(torch.tensor([1.0, -2.0]))
    one = make([first])
    steps(one, first, [[0.3, 0.1], [2.0, -0.5]])
    second, third = (nn.Parameter(first.detach().clone()) for _ in range(2))
    two = make([second])
    two.load_state([{name: a.copy() for name, a in own.items()} for own in one.state()])
    expected = steps(one, first, [[0.1, 0.7]])
    assert torch.equal(steps(two, second, [[0.1, 0.7]]), expected)
    assert not torch.equal(steps(make([third]), third, [[0.1, 0.7]]), expected)
