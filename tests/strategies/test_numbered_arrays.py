"""Arrays of ported apps, named 0, 1, 2, …: what is a buffer is told, mapped or asked for."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from torch import nn

import fedapps
from clients.core.arrays import is_statistic, to_record
from fedapps.engines.in_process_grid import InProcessGrid
from strategies.methods._preferences import CentralAdam
from strategies.methods.fedavg import FedAvg
from strategies.methods.fedgma import FedGMA
from strategies.methods.odpfl_hn import ODPFLHN
from strategies.methods.pfedhn import PFedHN
from strategies.methods.pfl import PFL

SMALL = {"embedding_dim": 2, "hidden_dim": 4, "evaluate_every": 1}


class Net(nn.Module):
    """Linear, batch normalisation, linear: arrays 4 and 5 are statistics, 6 counts steps."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.norm(self.body(x)))


def numbered(network, floats=False):
    """The network's arrays in order, as a NumPyClient sends them; Keras's have no counter."""
    arrays = [tensor.numpy() for tensor in network.state_dict().values()]
    return ArrayRecord([a for a in arrays if a.dtype.kind == "f" or not floats])


class Client(NumPyClient):
    """Trains the network that it gets, and keeps what it got."""

    def __init__(self, number, seen):
        self.number, self.seen = number, seen

    def fit(self, parameters, config):
        network = Net()
        state = network.state_dict()
        self.seen.append(parameters)
        values = zip(state, parameters, strict=True)
        network.load_state_dict({n: torch.as_tensor(np.array(a)) for n, a in values})
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(self.number)) + self.number
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        network.train()
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
        return [tensor.numpy() for tensor in network.state_dict().values()], 16, {}


def go(strategy, initial, rounds=2):
    seen = []
    client_app = fedapps.from_client_fn(
        lambda context: Client(context.node_config["partition-id"], seen)
    )
    grid = InProcessGrid(client_app, {}, [{"partition-id": i} for i in range(2)])
    strategy.start(grid, initial, rounds)
    return seen


@pytest.mark.parametrize("told", [{"network": Net()}, {"buffers": ("4", "5")}])
def test_statistics_are_averaged_under_their_numbers(told):
    """The second round's statistics are the mean of what both clients of the first returned."""
    strategy = PFedHN(**SMALL, **told, fraction_evaluate=0)
    seen = go(strategy, numbered(Net()))
    assert sorted(strategy.generator.targets.averages()) == ["4", "5", "6"]
    assert sorted(strategy.generator.targets.shapes()) == ["0", "1", "2", "3", "7", "8"]
    for mean, variance in ((first[4], first[5]) for first in seen[:2]):
        np.testing.assert_array_equal((mean, variance), (np.zeros(4), np.ones(4)))
    np.testing.assert_array_equal(seen[2][4], seen[3][4])  # one mean for both
    assert abs(seen[2][4]).max() > 0.01 and (seen[2][5] > 0).all()


def test_statistics_that_nobody_tells_are_asked_for():
    """Each name that may be one is in the sentence, and both ways to tell it."""
    with pytest.raises(ValueError, match=r"PFedHN .* 1, 2, 3, 4, 5 may be some; pass network=.*"
                                         r"buffers=\('4', '5'\).*name the arrays"):  # fmt: skip
        go(PFedHN(**SMALL), numbered(Net()))


@pytest.mark.parametrize("strategy", [FedGMA, CentralAdam])
def test_other_steps_along_statistics_are_refused_too(strategy):
    """Adam steps on a variance, and could make it negative."""
    with pytest.raises(ValueError, match=f"{strategy.__name__} treats .* 1, 2, 3, 4, 5 may be"):
        go(strategy(), numbered(Net()))
    assert len(go(strategy(fraction_evaluate=0), ArrayRecord(Net().state_dict()), 1)) == 2


def test_the_mean_needs_no_names():
    assert len(go(FedAvg(fraction_evaluate=0), numbered(Net()), 1)) == 2


def test_arrays_that_cannot_be_statistics_need_nothing():
    """A linear model: a matrix and a vector."""
    strategy = PFedHN(**SMALL)
    strategy.open(None, ArrayRecord([np.zeros((10, 64)), np.zeros(10)]), {})
    assert sorted(strategy.generator.targets.shapes()) == ["0", "1"]


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)


@pytest.mark.parametrize("initial", [ArrayRecord(Net().state_dict()), numbered(Net())])
def test_a_network_that_does_not_fit_is_refused(initial):
    """It would be ignored, and its buffers generated."""
    with pytest.raises(ValueError, match=r"network= is Wider, .* fit .*\(2, 4\).* not among"):
        PFedHN(network=Wider(), **SMALL).open(None, initial, {})


def test_a_network_of_other_names_is_refused():
    """Shapes alone map numbers, not names."""
    with pytest.raises(ValueError, match="network= is Sequential, which does not fit the arrays"):
        PFedHN(network=nn.Sequential(Net()), **SMALL).open(
            None, ArrayRecord(Net().state_dict()), {}
        )


def test_a_network_for_no_model_is_refused():
    models = {"s": {"w": np.zeros((2, 2), np.float32)}}
    for network in (nn.Linear(2, 2), {"xl": nn.Linear(2, 2)}):
        strategy = PFedHN(models=models, network=network, **SMALL)
        with pytest.raises(ValueError, match=r"network= is .*, but the arrays are those of s"):
            strategy.open(None, to_record(models["s"]), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffers": ("9", "4")}, "buffers= names '9', which is no array"),
        ({"buffers": "4"}, "give a tuple of names"),
        ({"buffers": ("4",), "network": Net()}, "leave out buffers="),
    ],
)
def test_buffers_are_names_of_arrays(options, message):
    with pytest.raises(ValueError, match=message):
        PFedHN(**options, **SMALL).open(None, numbered(Net()), {})


def test_personal_models_by_pfedhn_know_the_network_too():
    strategy = PFL(base="pfedhn", network=Wider(), embedding_dim=2, hidden_dim=4)
    with pytest.raises(ValueError, match="network= is Wider"):
        strategy.open(None, numbered(Net()), {})


def test_heads_that_are_not_there_are_refused():
    for strategy, message in (
        (PFL(base="fedper"), r"keeps the clients' head\.… arrays .* there are none among 0, 1"),
        (ODPFLHN(), r"needs target\.… and encoder.out.bias arrays"),
    ):
        with pytest.raises(ValueError, match=message):
            strategy.open(None, numbered(Net()), {})


def test_kerass_names_of_statistics_are_known():
    vector = np.zeros(3, np.float32)
    names = ("norm/moving_mean", "norm/moving_variance", "norm.running_var", "running_mean")
    assert all(is_statistic(name, vector) for name in names)
    assert not any(is_statistic(name, vector) for name in ("norm/gamma", "moving_mean/kernel"))


@pytest.mark.parametrize("network", ["Net", torch.nn.Linear])
def test_a_network_is_a_module(network):
    arrays = {"weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(ValueError, match=r"which is no torch.nn.Module; give .* network=Net\(\)"):
        PFedHN(network=network).initialize(arrays)
