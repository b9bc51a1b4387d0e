"""Mini-batches by the sampler of a user's loader, and forward passes in 16 bits, against the same
steps by hand."""

import numpy as np
import pytest
import torch
from component_runs import run_components
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import fedapps
from clients.core.draws import Draws
from fedapps.common import once
from fedapps.common.seeds import drawing

X = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)) - 0.5
Y = torch.arange(12) % 2
ROWS = TensorDataset(X, Y)


def linear():
    return nn.Linear(3, 2)


class Order:
    """A sampler of a known order, as long as it says; without a length it does not end."""

    def __init__(self, *rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


class Endless:
    def __iter__(self):
        while True:
            yield 1


def run(loader, method="fedavg", **settings):
    return run_components(method, linear, (loader, (X, Y)), (3,), **settings)[0]


def by_hand(mini_batches, lr=0.1, dtype=None):
    with drawing(0):
        net = linear()
    for rows in mini_batches:
        net.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(net(X[rows]), Y[rows])
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(lr * parameter.grad)
    return {name: p.detach().numpy() for name, p in net.named_parameters()}


def close(found, expected, rtol=1e-4, atol=1e-6):
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=rtol, atol=atol, err_msg=name)


def test_steps_take_the_samplers_order_from_pass_to_pass():
    """Five rows a pass in mini-batches of two: the third holds the last and the first row."""
    loader = DataLoader(ROWS, batch_size=2, sampler=Order(3, 3, 1, 0, 7))
    expected = by_hand([[3, 3], [1, 0], [7, 3]])
    close(run(loader, batch_size=2, local_steps=3), expected)
    expected = by_hand([[3, 3], [1, 0], [7], [3, 3], [1, 0], [7]])
    close(run(loader, batch_size=2, local_epochs=2), expected)
    expected = by_hand([[3, 3], [1, 0], [7], [3, 3]])
    close(run(loader, batch_size=2, local_steps=4, short_batches=True), expected)


def test_a_pass_shorter_than_a_mini_batch():
    loader = DataLoader(ROWS, batch_size=8, sampler=Order(4, 5))
    close(run(loader, batch_size=8, local_steps=2), by_hand([[4, 5], [4, 5]]))


def test_batches_of_a_sampler_stay_whole(monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    loader = DataLoader(ROWS, batch_sampler=Order([0, 1, 2], [5]))
    close(run(loader, local_steps=3), by_hand([[0, 1, 2], [5], [0, 1, 2]]))
    assert "mini-batches are those of Order; batch-size is not used" in once._said
    close(run(loader, local_epochs=1), by_hand([[0, 1, 2], [5]]))


def test_weights_decide_what_is_drawn_by_the_run_s_seed():
    """Rows without weight are never drawn; runs of one seed draw alike, of another otherwise."""
    weights = torch.zeros(12)
    weights[:2] = 1.0
    drawn = []

    class Noted(TensorDataset):
        def __getitem__(self, row):
            drawn.append(row)
            return super().__getitem__(row)

    loader = DataLoader(Noted(X, Y), batch_size=6, sampler=WeightedRandomSampler(weights, 12))
    settings = {"batch_size": 6, "local_steps": 4}
    first = run(loader, **settings)
    assert {*drawn[1:]} == {0, 1}  # the first item says what items are
    again = run(loader, **settings)
    other = run(loader, seed=1, **settings)
    np.testing.assert_array_equal(first["weight"], again["weight"])
    assert not np.array_equal(first["weight"], other["weight"])


def test_without_a_length_steps_alone_are_known():
    loader = DataLoader(ROWS, batch_size=2, sampler=Endless())
    close(run(loader, batch_size=2, local_steps=2), by_hand([[1, 1], [1, 1]]))
    with pytest.raises(RuntimeError, match=r"Endless has no length, .*or set local_steps"):
        run(loader, local_epochs=1)


@pytest.mark.parametrize(
    ("sampler", "settings", "words"),
    [
        (Order(0, 12), {}, r"Order drew the samples \[0, 12.*one or more of 0 … 11"),
        (Order(), {}, "Order draws no sample"),
        (Order(0, 1), {"method": "ditto"}, "ditto trains by steps of its own, which a DataLoader's "
         "Order does not reach.*fedavg, .*fedper"),
        (Order(0, 1), {"batch_draws": "independent"}, "batch-draws is 'independent', and the Data"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused(sampler, settings, words):
    with pytest.raises(RuntimeError, match=words):
        run(DataLoader(ROWS, sampler=sampler), **settings)


def test_positions_are_those_of_a_subset():
    subset = torch.utils.data.Subset(ROWS, [6, 7, 8])
    assert Draws(Order(2, 0), False).batches(3, 2, steps=1)[0].tolist() == [2, 0]
    loader = DataLoader(subset, batch_size=2, sampler=Order(2, 0))
    close(run(loader, batch_size=2, local_steps=1), by_hand([[8, 6]]))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_forward_passes_are_in_16_bits(name):
    """Parameters stay in 32 bits; float16's loss is scaled, which no gradient shows."""
    dtype = getattr(torch, name)
    loader = DataLoader(ROWS, batch_size=12, shuffle=True)
    found = run(loader, batch_size=12, local_steps=4, autocast=name)
    whole = [list(range(12))] * 4
    assert all(array.dtype == np.float32 for array in found.values())
    rounding = {"bfloat16": 4e-3, "float16": 5e-4}[name]
    close(found, by_hand(whole, dtype=dtype), rtol=rounding, atol=rounding / 10)
    full = by_hand(whole)
    assert any((found[n] != full[n]).any() for n in found)


def test_a_step_that_overflows_in_float16_is_left_out():
    """Its loss, 10⁵ times as large, has gradients above 65504 times the scale: none is taken."""

    def huge(z, y):
        return 1e36 * F.cross_entropy(z, y)

    found = run((X, Y), loss=huge, local_steps=1, autocast="float16", batch_size=12)
    close(found, by_hand([]))
    found = run((X, Y), local_steps=1, autocast="float16", batch_size=12, local_clip_norm=0.01)
    moved = np.concatenate([(found[n] - by_hand([])[n]).ravel() for n in found])
    assert np.linalg.norm(moved) == pytest.approx(0.1 * 0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "name", "words"),
    [
        ("fedavg", "fp16", "autocast is 'fp16'; it must be one of 'bfloat16', 'float16'"),
        ("scaffold", "bfloat16", "scaffold trains by steps of its own, which autocast= does not"),
    ],
)
def test_other_types_and_methods_are_refused(method, name, words):
    with pytest.raises(ValueError, match=words):
        fedapps.client_app(method, model=linear, data=lambda _: X, autocast=name)
