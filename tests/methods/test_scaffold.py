"""SCAFFOLD: lines 7-17 of Algorithm 1 by hand, and limits of what a client changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import federate, share, states, update
from torch import nn

from clients.core.arrays import from_record, group
from clients.methods.scaffold import ScaffoldClient
from strategies.core.replies import Node
from strategies.methods.scaffold import Scaffold


class Squared(ScaffoldClient):
    """½(wx − y)²: its gradient at x = 1, y = 0 is w."""

    def loss(self, x, y):
        return ((self.model(x)[:, 0] - y).square() / 2).mean()


def one(value):
    return np.array([value], np.float32)


def test_client_follows_lines_10_to_12():
    """x = 1, c = 0.5, c_i = 0.2, η = 0.1, K = 2. Line 10 adds c − c_i = 0.3 to the gradient y:
    y = 1 − 0.1·1.3 = 0.87, then 0.87 − 0.1·1.17 = 0.753, so Δy = −0.247. Line 12, option II:
    c⁺ = c_i − c + (x − y)/(K·η) = −0.3 + 0.247/0.2 = 0.935, the mean of the gradients 1 and 0.87.
    Δc = 0.935 − 0.2. The next round starts from c_i = 0.935 on the client."""
    samples = share(torch.ones(2, 1), torch.zeros(2))
    client = Squared(nn.Linear(1, 1, bias=False), samples, lr=0.1, local_steps=2)
    client.state = {"control/weight": np.array([[0.2]], np.float32)}
    sent = {"weight": np.array([[1.0]], np.float32)}
    sent["control/weight"] = np.array([[0.5]], np.float32)
    reply, count, _ = client.train(sent, {})
    assert count == 2 and reply.keys() == {"delta/weight", "control/weight"}
    assert reply["delta/weight"].item() == pytest.approx(-0.247)
    assert reply["control/weight"].item() == pytest.approx(0.735)
    assert client.state["control/weight"].item() == pytest.approx(0.935)


def test_server_follows_lines_16_and_17():
    """N = 4, |S| = 2, η_g = 1.5: x = 1 + 1.5·(1 + 3)/2 = 4; c = 0.5 + 2/4·(0.2 + 0.6)/2 = 0.7."""
    strategy = Scaffold(server_lr=1.5)
    strategy.nodes = [Node(i, 50 + i) for i in range(4)] + [Node(9, 59, novel=True)]
    replies = [
        update(0, {"delta/w": one(1), "control/w": one(0.2)}),
        update(2, {"delta/w": one(3), "control/w": one(0.6)}),
    ]
    after = strategy.aggregate({"w": one(1), "control/w": one(0.5)}, replies)
    assert after["w"].item() == pytest.approx(4)
    assert after["control/w"].item() == pytest.approx(0.7)


@pytest.mark.parametrize(("ratio", "x"), [(3.0, 2.2), (0.0, 2.5)])
def test_a_long_change_counts_less(ratio, x):
    """Changes 0 and 2, the second of ρ = 4.5: at ratio 3 its weight is 2/3, the mean 0.8, and
    x = 1 + 1.5·0.8; without the limit x = 1 + 1.5·1."""
    strategy = Scaffold(max_examples_ratio=ratio)
    strategy.nodes = [Node(i, 50 + i) for i in range(2)]
    replies = [update(i, {"delta/w": one(2 * i), "control/w": one(0)}) for i in range(2)]
    replies[1] = replace(replies[1], rho=4.5)
    after = strategy.aggregate({"w": one(1), "control/w": one(0)}, replies)
    assert after["w"].item() == pytest.approx(x)


@pytest.mark.parametrize(("ratio", "first", "second"), [(5.0, 13 / 3, 15 / 3), (0.0, 103 / 3, 35)])
def test_a_c_i_that_is_too_long_is_cut(ratio, first, second):
    """c_i of 1, 2 and 100 have the median norm 2: the last is cut to 10, c = (1 + 2 + 10)/3. Then
    client 0 alone adds 2, the median is 3, and nothing is cut: c = (3 + 2 + 10)/3."""
    strategy = Scaffold(max_update_ratio=ratio)
    strategy.nodes = [Node(i, 50 + i) for i in range(3)]
    arrays = {"w": one(1), "control/w": one(0)}
    for expected, changes in ((first, (1, 2, 100)), (second, (2,))):
        replies = [
            update(i, {"delta/w": one(0), "control/w": one(change)})
            for i, change in enumerate(changes)
        ]
        arrays = strategy.aggregate(arrays, replies)
        assert arrays["control/w"].item() == pytest.approx(expected)


@pytest.mark.parametrize("ratio", [5.0, 0.0])
def test_c_is_the_mean_of_all_that_were_ever_there(ratio):
    """Two clients have c_i = 1 and 3. One leaves, and the other adds 2: (1 + 5)/2. Both are there
    again with two new ones, and one of them becomes 2: (1 + 5 + 2 + 0)/4."""
    strategy, arrays = Scaffold(max_update_ratio=ratio), {"w": one(1), "control/w": one(0)}
    steps = (((0, 1), {0: 1, 1: 3}, 2), ((1,), {1: 2}, 3), ((0, 1, 2, 3), {3: 2}, 2))
    for present, changes, expected in steps:
        strategy.nodes = [Node(i, 50 + i) for i in present]
        replies = [
            update(i, {"delta/w": one(0), "control/w": one(change)})
            for i, change in changes.items()
        ]
        arrays = strategy.aggregate(arrays, replies)
        assert arrays["control/w"].item() == pytest.approx(expected)


@pytest.mark.parametrize("method", ["scaffold", "fedadg"])
def test_no_local_step_is_a_valid_reply(method):
    _, grid = federate(method=method, **{"local-steps": 0, "rounds": 2, "num-clients": 4})
    assert states(grid, method)


def test_running_statistics_are_averaged_not_extrapolated():
    strategy = Scaffold(server_lr=1.5)
    strategy.nodes = [Node(0, 50), Node(1, 51)]
    start = {"bn.weight": one(0), "bn.running_var": one(5), "bn.num_batches_tracked": np.array(1)}
    arrays = strategy.initialize(start)
    assert group(arrays, "control").keys() == {"bn.weight"}
    assert strategy.expected(arrays).keys() == {
        "delta/bn.weight", "control/bn.weight", "bn.running_var", "bn.num_batches_tracked"
    }  # fmt: skip
    zero = {"delta/bn.weight": one(0), "control/bn.weight": one(0)}
    replies = [
        update(i, zero | {"bn.running_var": one(v), "bn.num_batches_tracked": np.array(k)})
        for i, (v, k) in enumerate([(1, 3), (3, 5)])
    ]
    after = strategy.aggregate(arrays, replies)
    assert after["bn.running_var"].item() == 2
    assert after["bn.num_batches_tracked"].item() == 4


def test_c_is_the_mean_of_all_c_i_under_partial_participation():
    result, grid = federate(
        method="scaffold", **{"num-clients": 10, "rounds": 3, "fraction-train": 0.4}
    )
    c_i = [group(state, "control") for state in states(grid, "scaffold").values()]
    assert 2 < len(c_i) <= 5  # some were sampled, never all five at once
    c = group(from_record(result.arrays), "control")
    for name, array in c.items():
        mean = sum(one[name] for one in c_i) / 5
        np.testing.assert_allclose(array, mean, atol=1e-6)
        assert np.abs(array).max() > 0


@pytest.mark.parametrize("setting", [{"momentum": 0.9}, {"lr": 0.0}])
def test_settings_that_option_ii_excludes(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        ScaffoldClient(nn.Linear(1, 1), share(torch.ones(1, 1), torch.zeros(1)), **setting)


def test_who_only_predicts_gets_no_control_variates():
    strategy, node = Scaffold(), Node(0, 50)
    arrays = strategy.initialize({"w": one(2)})
    assert strategy.personalize(arrays, [node]) == {node: {"w": one(2)}}
    assert strategy.broadcast(arrays, [node])[node].keys() == {"w", "control/w"}
