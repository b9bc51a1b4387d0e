"""Every method on a GPU: what the CPU gives, up to rounding. Run by ``pytest -m gpu``."""

import pytest
import torch
from tiny import NEEDS, SMALL, federate

from fedapps.clientapp import app
from fedapps.engines.grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.serverapp import run

pytestmark = pytest.mark.gpu
DRAWS_THERE = {"fedsr"}  # noise, by the device's own generator


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    assert torch.cuda.is_available(), "these tests need a GPU"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # 10 bits of a mantissa


def told(result):
    """All numbers of a run's rounds."""
    return [
        {**result.train_metrics_clientapp[i], **result.evaluate_metrics_clientapp[i]}
        for i in (1, 2)
    ]


def compare(ours, other):
    for name, array in ours.arrays.items():
        assert other.arrays[name].numpy() == pytest.approx(array.numpy(), rel=1e-2, abs=1e-3), name
    for one, two in zip(told(ours), told(other), strict=True):
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert two[key] == pytest.approx(value, rel=1e-2, abs=1e-3), key


@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_gives_what_the_cpu_gives(method):
    settings = NEEDS.get(method, {}) | {"method": method}
    on_cpu, on_gpu = (federate(**settings, device=device)[0] for device in ("cpu", "cuda"))
    if method not in DRAWS_THERE:
        compare(on_cpu, on_gpu)


@pytest.mark.parametrize("model", ["mlp", "lenet", "convnet"])
def test_a_cohort_gives_what_clients_in_turn_give(model):
    config = SMALL | {"model": model, "dataset": "mnist", "num-clients": 20, "device": "cuda"}
    one, many = (
        run(InProcessGrid.simulation(app, config, 20, cohort), config, "in-process")
        for cohort in (1, 10)
    )
    compare(one, many)
