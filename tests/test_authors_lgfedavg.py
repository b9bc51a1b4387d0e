"""Our LG-FedAvg's second phase beside the authors' program, which FEDAPPS_AUTHORS_DIR/LG-FedAvg
holds (github.com/pliang279/LG-FedAvg, commit 7af0568): `main_lg.py` from a saved FedAvg model, in
float64, with their MLP, whose last layers stay shared. Clients are of equal sizes, since its means
have no weights, and train on all their samples at once, since its order is random.

FEDAPPS_AUTHORS_DIR=… pytest -n0 -m slow tests/test_authors_lgfedavg.py"""

import os
import pickle
import runpy
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import Wide, share, train_rounds
from torch.utils.data import TensorDataset

from clients.core.arrays import model_arrays
from clients.methods.lgfedavg import OWN_BODIES, LGFedAvgClient
from strategies.core.replies import Node
from strategies.methods.lgfedavg import LGFedAvg

FOLDER = Path(os.environ.get("FEDAPPS_AUTHORS_DIR", "/nowhere")) / "LG-FedAvg"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="FEDAPPS_AUTHORS_DIR names no such folder"),
]
CLIENTS, SAMPLES, ROUNDS, EPOCHS, LR = 3, 6, 3, 2, 0.05
PACKAGES = ("utils", "models")  # theirs, on the top level
LAYERS = ("layer_input", "layer_hidden1", "layer_hidden2", "layer_hidden3", "layer_out")


@pytest.fixture
def authors(monkeypatch):
    """Their modules by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield import_module
    torch.set_default_dtype(dtype)
    for name in list(sys.modules):
        if name.split(".")[0] in PACKAGES:
            del sys.modules[name]


@pytest.mark.parametrize("kept", [1, 3])
def test_the_second_phase(authors, monkeypatch, tmp_path, kept):
    """Every client's whole model after three rounds of all clients."""
    x = torch.randn(CLIENTS * SAMPLES, 1, 4, 4)
    y = torch.arange(CLIENTS * SAMPLES) % 3
    rows = {i: list(range(i * SAMPLES, (i + 1) * SAMPLES)) for i in range(CLIENTS)}
    args = SimpleNamespace(
        gpu=-1, dataset="mnist", model="mlp", iid=False, num_users=CLIENTS, frac=1.0,
        local_ep=EPOCHS, shard_per_user=2, results_save="run", load_fed="fed.pt", epochs=ROUNDS,
        num_layers_keep=kept, lr=LR, local_bs=SAMPLES, bs=SAMPLES, verbose=False,
    )  # fmt: skip
    make = authors("models.Nets").MLP
    pretrained = make(16, 0, 3)
    monkeypatch.chdir(tmp_path)
    base = tmp_path / f"save/mnist/mlp_iidFalse_num{CLIENTS}_C1.0_le{EPOCHS}/shard2/run"
    (base / "fed").mkdir(parents=True)
    torch.save(pretrained.state_dict(), base / "fed" / "fed.pt")
    (base / "dict_users.pkl").write_bytes(pickle.dumps((rows, rows)))
    samples = TensorDataset(x, y)
    samples.targets = y.tolist()
    data = (samples, samples, rows, rows)
    monkeypatch.setattr(authors("utils.options"), "args_parser", lambda: args)
    monkeypatch.setattr(authors("utils.train_utils"), "get_data", lambda _: data)
    monkeypatch.setattr(authors("utils.train_utils"), "get_model", lambda _: make(16, 0, 3))
    theirs = runpy.run_path(str(FOLDER / "main_lg.py"), run_name="__main__")["net_local_list"]

    shared = ",".join(LAYERS[-kept:])
    strategy = LGFedAvg(fedavg_rounds=0, shared_layers=shared)
    arrays = strategy.initialize(model_arrays(pretrained))
    nodes = [Node(i, 10 + i) for i in range(CLIENTS)]
    ours = []
    for i in range(CLIENTS):
        held = share(x[rows[i]], y[rows[i]])
        held = replace(held, train=Wide(x[rows[i]], y[rows[i]], torch.arange(SAMPLES)))
        settings = {"lr": LR, "momentum": 0.5, "local_epochs": EPOCHS, "batch_size": SAMPLES}
        client = LGFedAvgClient(make(16, 0, 3), held, shared_layers=shared, **settings)
        ours.append(client)
    arrays = train_rounds(strategy, arrays, ours, nodes, ROUNDS, {OWN_BODIES: True})
    for client, node, network in zip(ours, nodes, theirs, strict=True):
        client.receive(strategy.personalize(arrays, [node])[node], {})
        for name, expected in network.state_dict().items():
            found = client.model.state_dict()[name]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        moved = network.layer_input.weight - pretrained.layer_input.weight
        assert moved.abs().max() > 1e-6
