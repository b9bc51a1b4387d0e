"""Every method on a GPU has the results of the CPU, up to rounding: ``pytest -m gpu``, which also
runs the tests of other files that take the fixture `anywhere`."""

import pytest
import torch
from small_runs import ALL_SAMPLES, NEEDS, SMALL, federate, share
from torch import nn

from clients.core.sgd import SGD, Adam
from clients.methods.pfedhn import PFedHNPCClient
from clients.models import build_model
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.serverapp import run

pytestmark = pytest.mark.gpu
DEVICE_NOISE = {"fedsr", "hyperfedzero"}  # their noise comes from the device's own generator


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    assert torch.cuda.is_available(), "these tests need a GPU"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # 10 bits of a mantissa


def compare(one, other):
    for name, array in one.arrays.items():
        assert other.arrays[name].numpy() == pytest.approx(array.numpy(), rel=1e-2, abs=1e-3), name
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        for round_ in (1, 2):
            metrics = dict(getattr(one, kind)[round_])
            assert dict(getattr(other, kind)[round_]) == pytest.approx(metrics, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_has_the_results_of_the_cpu(method):
    settings = NEEDS.get(method, {}) | {"method": method}
    on_cpu, on_gpu = (federate(**settings, device=device)[0] for device in ("cpu", "cuda"))
    if method not in DEVICE_NOISE:
        compare(on_cpu, on_gpu)


@pytest.mark.parametrize("model", ["mlp", "lenet", "convnet"])
def test_a_cohort_has_the_results_of_clients_in_turn(model):
    config = (
        SMALL
        | ALL_SAMPLES
        | {"model": model, "dataset": "mnist", "num-clients": 20, "device": "cuda"}
    )
    one, many = (
        run(InProcessGrid.simulation(app, config, 20, cohort), config, "in-process")
        for cohort in (1, 10)
    )
    compare(one, many)


@pytest.mark.parametrize("make", [lambda p: SGD([p], 0.1, 0.9, 0.1), lambda p: Adam([p], 0.1)])
def test_fused_steps_are_the_cpu_s_whatever_the_strides(make):
    plain, last = torch.contiguous_format, torch.channels_last
    found = []
    for device, of_p, of_g in [("cpu", plain, plain)] + [
        ("cuda", of_p, of_g) for of_p in (plain, last) for of_g in (plain, last)
    ]:
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(2, 3, 4, 5).to(device, memory_format=of_p))
        optimizer = make(p)
        for _ in range(3):
            p.grad = torch.randn(2, 3, 4, 5).to(device, memory_format=of_g)
            optimizer.step()
        found.append(p.detach().cpu())
    for p in found[1:]:
        torch.testing.assert_close(p, found[0])


def test_outputs_for_classes_that_a_client_lacks_are_on_the_gpu():
    samples = share(torch.ones(4, 3), [4, 1, 1, 4])
    settings = {"local_classes": True, "device": "cuda"}
    client = PFedHNPCClient(build_model("mlp-small", (3,), 6, 0), samples, **settings)
    x = torch.randn(2, 3, device="cuda")
    torch.testing.assert_close(client.personal_model(x)(x), client.predict(x))
