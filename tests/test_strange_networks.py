"""Networks as people bring them: FedAvg is FedAvg, and every other method trains or says which
layers it cannot use. All pairs: pytest -n0 -m slow tests/test_strange_networks.py"""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import unusual_networks
from flwr.app import ArrayRecord
from safetensors.numpy import load_file
from small_runs import NEEDS, WEE
from torch.nn import functional as F

import fedapps
import partitions
from clients.core.sgd import batches
from fedapps.clientapp import app
from fedapps.common import external_code
from fedapps.common.seeds import drawing, seed_of
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.engines.run import run_jobs
from fedapps.methods import METHODS
from fedapps.planning import make_jobs
from fedapps.serverapp import APPS, run
from fedapps.settings.config import defaults
from strategies.methods.fedavg import FedAvg

NETWORKS = ("LogProbabilities", "ViewFlattens", "Scaled", "HeadIsFirst", "AuxiliaryOutputs",
            "NamedOutputs", "FrozenBody", "TiedLayers", "RepeatedLayer", "compiled")  # fmt: skip
CONFIG = defaults() | WEE
CONFIG |= {"num-clients": 4, "rounds": 3, "local-steps": 4, "evaluate-every": 3, "batch-size": 32}
HEADLESS = ("LogProbabilities", "Scaled")  # no linear layer gives their outputs
NORMED = ("fedbn", "bn-adapt")
TWO_CLASSES = ("fedembed", "global", "global+", "pfedkm")  # likes and dislikes
BODIES = ("fedper", "fedrep", "fedbabu", "lg-fedavg", "pfedhn-pc")  # something must be shared
CHAINS = {
    "Scaled": "'temperature'",
    "HeadIsFirst": "'classifier' .* 'head'",
    "AuxiliaryOutputs": "'side' has 10 outputs, but 'out'",
    "NamedOutputs": "hidden layers, but the network has none: its arrays are out.",
    "FrozenBody": "'backbone.bias'",
    "TiedLayers": "'decode.weight'",
    "RepeatedLayer": "'decode.bias'",
}
QUICK_METHODS = ("per-fedavg", "fedper", "pfedhn", "fedtta++", "fedma", "lg-fedavg", "fedala")


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    """tests/support/unusual_networks.py is code from outside the package."""
    names = (*NETWORKS, "SingleLogit", "BatchStatistics")
    monkeypatch.setenv(external_code.VARIABLE, ",".join(f"unusual_networks:{n}" for n in names))


def configuration(method, network):
    needs = {key: value for key, value in NEEDS.get(method, {}).items() if key != "model"}
    keys = {"model", f"{method}.model"} & CONFIG.keys()
    reference = f"unusual_networks:{network}"
    more = {"method": method, "lg-fedavg.fedavg-rounds": 1, "lr": 0.1}
    return CONFIG | needs | dict.fromkeys(keys, reference) | more


def by_hand(network, config):
    """FedAvg as one writes it: torch's own SGD, and the mean weighted by samples."""
    federation = partitions.federation(config)
    with drawing(0):
        net = getattr(unusual_networks, network)()
    server = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for round_ in range(1, config["rounds"] + 1):
        total = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in server.items()}
        count = 0
        for client in range(config["num-clients"]):
            share = federation.share(client)
            if share.novel:
                continue
            x, y = share.train[:]
            net.load_state_dict(server)
            net.train()
            optimizer = torch.optim.SGD(
                [p for p in net.parameters() if p.requires_grad], lr=config["lr"]
            )
            draws = torch.Generator().manual_seed(seed_of(0, "batches", round_, client))
            steps = config["local-steps"]
            for rows in batches(len(y), config["batch-size"], steps=steps, generator=draws):
                output = net(x[rows])
                if isinstance(output, dict):
                    output = output["logits"]
                elif isinstance(output, tuple):
                    output = output[0]
                optimizer.zero_grad()
                F.cross_entropy(output, y[rows]).backward()
                optimizer.step()
            count += len(y)
            for name, tensor in net.state_dict().items():
                total[name] += len(y) * tensor.double()
        server = {name: (t / count).to(server[name].dtype) for name, t in total.items()}
    trained = {name for name, p in net.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {name: t.numpy() for name, t in server.items() if name in trained}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


def moved(arrays, network):
    """Whether training changed the network, so that two equal results say something."""
    with drawing(0):
        start = getattr(unusual_networks, network)().state_dict()
    return max(float(abs(a - start[n].float().numpy()).max()) for n, a in arrays.items()) > 0.01


@pytest.mark.parametrize("network", [n for n in NETWORKS if n != "compiled"])
def test_fedavg_gives_what_a_hand_written_fedavg_gives(network):
    config = configuration("fedavg", network)
    result = run(InProcessGrid.simulation(app, config, 4), config, "in-process")
    found = {name: array.numpy() for name, array in result.arrays.items()}
    assert_equal(found, by_hand(network, config))
    assert moved(found, network)


def test_a_compiled_network_is_trained_as_it_was_before():
    """Under its own names."""
    config = configuration("fedavg", "compiled")
    result = run(InProcessGrid.simulation(app, config, 4), config, "in-process")
    found = {name: array.numpy() for name, array in result.arrays.items()}
    assert_equal(found, by_hand("ViewFlattens", config))


@pytest.mark.parametrize("method", ["fedavg", "atp", "fedtta"])
def test_a_network_split_over_devices_is_trained_on_one(method, monkeypatch):
    """Under its own names, also by methods that call it with other weights, which torch refuses
    for DataParallel."""
    monkeypatch.setenv(external_code.VARIABLE, "unusual_networks:parallel")
    config = configuration(method, "parallel") | {"rounds": 1, "evaluate-every": 1}
    result = run(InProcessGrid.simulation(app, config, 4), config, "in-process")
    names = {name.removeprefix("base.") for name in result.arrays}
    assert {"0.1.weight", "0.1.bias", "1.weight", "1.bias"} <= names


def test_fedavg_in_an_app_of_ones_own_is_the_same():
    """`client_app` trains what the command trains."""
    config = configuration("fedavg", "ViewFlattens")
    federation = partitions.federation(config)
    nodes = [{"partition-id": i} for i in range(4) if not federation.share(i).novel]

    def data(context):
        return federation.share(context.node_config["partition-id"]).train[:]

    settings = {"lr": 0.1, "local_steps": 4, "batch_size": 32}
    client_app = fedapps.client_app(
        "fedavg", model=unusual_networks.ViewFlattens, data=data, **settings
    )
    with drawing(0):
        initial = ArrayRecord(unusual_networks.ViewFlattens().state_dict())
    grid = InProcessGrid(client_app, {}, nodes)
    result = FedAvg(min_available_nodes=len(nodes)).start(grid, initial, config["rounds"])
    found = {name: array.numpy() for name, array in result.arrays.items()}
    assert_equal(found, by_hand("ViewFlattens", config))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "network"), [("ray", "AuxiliaryOutputs"), ("flower", "Scaled")])
def test_fedavg_is_the_same_in_other_engines(engine, network, tmp_path, monkeypatch):
    folder = str(Path(unusual_networks.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
    config = configuration("fedavg", network)
    (job,) = jobs = make_jobs(config, ["fedavg"], [0], tmp_path)
    run_jobs(jobs, engine, APPS, follow=lambda jobs: None)
    assert job.error == ""
    found = load_file(job.folder / "model-final.safetensors")
    assert_equal(found, by_hand(network, config))


def refusal(method, network):
    """What the sentence must say where the method cannot use the network; None where it trains."""
    entry = METHODS[method]
    if method in TWO_CLASSES:
        return r"gives \(2, 10\) for 2 inputs, not logits \(2, 2\)"
    if method in NORMED:
        return f"needs batch normalisation, {network.replace('compiled', 'ViewFlattens')} has none"
    if method == "fedma":
        return CHAINS.get(network)
    if entry.client.uses_head(fedapps_settings(method)) and network in HEADLESS:
        return rf"{network} does not end .* it has '\w+' \(64 → 24\), '\w+' \(24 → 10\)"
    if network == "FrozenBody" and method in BODIES:
        return r"body.backbone.*(are frozen|frozen, so nothing)"
    if network in ("FrozenBody", "NamedOutputs") and method == "shot":
        return "shot adapts what comes before the head, and the network trains nothing there"
    if network == "NamedOutputs" and method in BODIES:
        return "only (the head|shared layers)|nothing of .* would be shared"
    return None


def fedapps_settings(method):
    from fedapps.settings.config import settings

    return settings(CONFIG, method)


QUICK = {(method, network) for method in QUICK_METHODS for network in NETWORKS}
QUICK |= {(method, "AuxiliaryOutputs") for method in METHODS}
QUICK |= {("apfl", "RepeatedLayer"), ("flowdup", "RepeatedLayer"), ("shot", "FrozenBody")}
PAIRS = [
    pytest.param(m, n, marks=() if (m, n) in QUICK else pytest.mark.slow)
    for m in METHODS
    for n in NETWORKS
]


@pytest.mark.parametrize(("method", "network"), PAIRS)
def test_a_method_trains_or_names_the_layers(method, network):
    config = configuration(method, network) | {"rounds": 2, "evaluate-every": 2}
    grid = InProcessGrid.simulation(app, config, 4)
    wrong = refusal(method, network)
    if wrong:
        with pytest.raises(ValueError) as refused:
            run(grid, config, "in-process")
        assert re.search(wrong, str(refused.value)), refused.value
        return
    result = run(grid, config, "in-process")
    assert result.train_metrics_clientapp[2]["valid-replies"] == 2
    assert 0 <= result.evaluate_metrics_clientapp[2]["train-accuracy"] <= 1


def test_a_single_output_is_refused_with_the_layers_that_are_there():
    config = configuration("fedavg", "SingleLogit")
    with pytest.raises(ValueError, match=r"one output.*'out' \(64 → 1\).*10 outputs"):
        run(InProcessGrid.simulation(app, config, 4), config, "in-process")


@pytest.mark.parametrize(
    ("method", "settings"),
    [("fedmd", {}), ("fedala", {}), ("pfedhn", {"pfedhn.descriptor": "class-proportions"})],
)
def test_a_network_that_needs_two_inputs_gets_two_where_a_method_asks_for_its_outputs(
    method, settings
):
    config = configuration(method, "BatchStatistics") | settings | {"rounds": 2}
    result = run(InProcessGrid.simulation(app, config, 4), config, "in-process")
    assert result.train_metrics_clientapp[2]["valid-replies"] == 2
