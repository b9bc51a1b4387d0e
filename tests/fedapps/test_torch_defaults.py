"""A run trains alike, whatever the program around it has set in torch, which stays as it was."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from component_runs import run_components
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file
from torch import nn

import fedapps
from clients.core.arrays import from_record, to_record
from fedapps.engines.in_process_grid import InProcessGrid
from strategies import PFedHN

SMALL = {"num_clients": 4, "rounds": 1, "local_steps": 1, "jobs": 1, "progress": False}
X = torch.rand(20, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0.5).long()


@contextmanager
def wide_numbers():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def another_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND = [wide_numbers, another_device, torch.inference_mode, torch.no_grad]


def components():
    return run_components("fedavg", lambda: nn.Linear(3, 2), ((X, Y), (X, Y)), (3,))[0]


@pytest.mark.parametrize("around", AROUND)
def test_a_run_is_the_same(around, tmp_path):
    fedapps.run("fedavg", output=tmp_path / "plain", **SMALL)
    with around():
        before = torch.empty(0).dtype, torch.get_default_device(), torch.is_grad_enabled()
        runs = fedapps.run("fedavg", output=tmp_path / "around", **SMALL)
        x = torch.rand(3, 1, 8, 8, device="cpu")
        model = runs[0].personalize(x)
        assert model.predict(x).shape == (3,)
        assert before == (
            torch.empty(0).dtype,
            torch.get_default_device(),
            torch.is_grad_enabled(),
        )
    plain, found = (
        load_file(tmp_path / name / "fedavg-seed0" / "model.safetensors")
        for name in ("plain", "around")
    )
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("around", AROUND)
def test_components_of_an_app_train_the_same(around):
    expected = components()
    with around():
        found = components()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def hypernetwork(defaults):
    """The arrays of PFedHN after two rounds of a strategy by hand, with clients of another package;
    `defaults` gets the type and the device of a tensor that such a client makes."""
    client_app = ClientApp()

    @client_app.train()
    def train(message, context):
        defaults.append((torch.empty(0).dtype, torch.empty(0).device.type))
        arrays = from_record(message.content["arrays"])
        moved = to_record({name: a + np.float32(context.node_id) for name, a in arrays.items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    strategy = PFedHN(hidden_dim=4, fraction_evaluate=0, min_available_nodes=2)
    start = to_record({"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)})
    grid = InProcessGrid(client_app, {}, [{}, {}])
    return from_record(strategy.start(grid, start, num_rounds=2).arrays)


@pytest.mark.parametrize("around", AROUND)
def test_a_strategy_in_ones_own_server_trains_the_same(around):
    """With gradients off or on another device PFedHN failed; with wide numbers it began elsewhere.
    The code around the strategy keeps its defaults, as clients in the same process show."""
    expected = hypernetwork([])
    with around():
        seen = []
        found = hypernetwork(seen)
        here = torch.empty(0).dtype, torch.empty(0).device.type
    assert set(seen) == {here}
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_network_of_wide_numbers_is_refused_where_these_are_the_default(tmp_path):
    """Its inputs are float32 whatever the default, so its trial fails as a run would."""

    def wide():
        return nn.Linear(3, 2).double()

    with (
        wide_numbers(),
        pytest.raises(ValueError, match=r"float64, and inputs are float32: return"),
    ):
        run_components("fedavg", wide, ((X, Y), (X, Y)), (3,))
