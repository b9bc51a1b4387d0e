"""A run trains alike, whatever the program around it has set in torch, which stays as it was."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from component_runs import run_components
from safetensors.numpy import load_file
from torch import nn

import fedapps

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


def test_a_network_of_wide_numbers_is_refused_where_these_are_the_default(tmp_path):
    """Its inputs are float32 whatever the default, so its trial fails as a run would."""

    def wide():
        return nn.Linear(3, 2).double()

    with (
        wide_numbers(),
        pytest.raises(ValueError, match=r"float64, and inputs are float32: return"),
    ):
        run_components("fedavg", wide, ((X, Y), (X, Y)), (3,))
