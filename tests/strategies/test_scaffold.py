import numpy as np
import pytest
import torch
from tiny import federate, share, states, update
from torch import nn

from clients.arrays import from_record, group, model_arrays
from clients.base import Client
from clients.scaffold import ScaffoldClient
from strategies.fedavg import FedAvg
from strategies.replies import Node
from strategies.scaffold import Scaffold


class Squared(ScaffoldClient):
    """½(wx − y)²: its gradient at x = 1, y = 0 is w."""

    def loss(self, x, y):
        return ((self.model(x)[:, 0] - y).square() / 2).mean()


def one(value):
    return np.array([value], np.float32)


def test_client_follows_lines_10_and_12():
    """w = 1, g = w, c = 0.3, c_i = 0.1, η_l = 0.1, K = 2: w → 1 − 0.1·(1 + 0.2) = 0.88 →
    0.88 − 0.1·1.08 = 0.772; c_i⁺ = 0.1 − 0.3 + 0.228/0.2 = 0.94."""
    model = nn.Linear(1, 1, bias=False)
    client = Squared(model, share(torch.ones(4, 1), torch.zeros(4)), lr=0.1, local_steps=2)
    client.state = {"control/weight": np.array([[0.1]], np.float32)}
    sent = {"weight": np.ones((1, 1), np.float32)}
    sent["control/weight"] = np.array([[0.3]], np.float32)
    reply, n, _ = client.train(sent, {})
    assert n == 4
    assert reply.keys() == {"delta/weight", "control/weight"}
    assert reply["delta/weight"].item() == pytest.approx(-0.228)
    assert reply["control/weight"].item() == pytest.approx(0.84)
    assert client.state["control/weight"].item() == pytest.approx(0.94)


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


def test_zero_control_variates_and_one_local_step_are_fedavg():
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 3), torch.randint(3, (2, 8))
    model = nn.Linear(3, 3)
    start = model_arrays(model)
    strategy = Scaffold(server_lr=1.0)
    strategy.nodes = [Node(0, 50), Node(1, 51)]
    sent = strategy.initialize(start)
    ours, theirs = [], []
    for i in range(2):
        settings = {"client": i, "lr": 0.1, "local_steps": 1, "batch_size": 4}
        ours.append(
            update(i, ScaffoldClient(model, share(x[i], y[i]), **settings).train(sent, {})[0])
        )
        theirs.append(update(i, Client(model, share(x[i], y[i]), **settings).train(start, {})[0]))
    one_step = strategy.aggregate(sent, ours)
    expected = FedAvg().aggregate(start, theirs)
    for name, array in expected.items():
        np.testing.assert_allclose(one_step[name], array, atol=1e-6)
        assert not np.allclose(array, start[name])


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


def test_c_i_survives_rounds_without_its_client():
    settings = {"method": "scaffold", "num-clients": 10, "fraction-train": 0.4}
    early = states(federate(**settings, rounds=1)[1], "scaffold")
    late = states(federate(**settings, rounds=2)[1], "scaffold")
    kept = [
        node
        for node in early
        if all((early[node][name] == late[node][name]).all() for name in early[node])
    ]
    assert len(early) == 2 and kept and len(late) > 2


@pytest.mark.parametrize("setting", [{"momentum": 0.9}, {"lr": 0.0}])
def test_settings_that_option_ii_excludes(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        ScaffoldClient(nn.Linear(1, 1), share(torch.ones(1, 1), torch.zeros(1)), **setting)


def test_who_only_predicts_gets_no_control_variates():
    strategy, node = Scaffold(), Node(0, 50)
    arrays = strategy.initialize({"w": one(2)})
    assert strategy.personalize(arrays, [node]) == {node: {"w": one(2)}}
    assert strategy.broadcast(arrays, [node])[node].keys() == {"w", "control/w"}
