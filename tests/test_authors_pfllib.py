"""Ours beside PFLlib's servers and clients, which FEDAPPS_AUTHORS_DIR/PFLlib holds
(github.com/TsingZ0/PFLlib, commit d832e76): three rounds of two clients of different sizes, in
float64, from the same weights on the same mini-batches. Rates are powers of two, since SCAFFOLD's
K·η is a float32 here. pFedMe's clients are of equal sizes: its mean has no weights here, as in the
paper, and theirs counts samples.

FEDAPPS_AUTHORS_DIR=… pytest -n0 -m slow tests/test_authors_pfllib.py"""

import importlib
import os
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from small_runs import Wide, share, train_rounds
from torch import nn

from clients.core.arrays import group, to_tensors
from clients.methods.lgfedavg import OWN_BODIES
from fedapps.methods import METHODS
from strategies.core.replies import Node

FOLDER = Path(os.environ.get("FEDAPPS_AUTHORS_DIR", "/nowhere")) / "PFLlib" / "system"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="FEDAPPS_AUTHORS_DIR names no such folder"),
]
UNUSED = ("h5py", "utils", "utils.dlg", "utils.data_utils")  # imported and not needed
OFF = (  # arguments of their program
    "algorithm", "dataset", "save_folder_name", "few_shot", "random_join_ratio", "goal",
    "time_select", "top_cnt", "auto_break", "client_drop_rate", "train_slow_rate",
    "send_slow_rate", "dlg_eval", "dlg_gap", "batch_num_per_client", "num_new_clients",
    "fine_tuning_epoch_new", "learning_rate_decay",
)  # fmt: skip
SIZES = [12, 8]  # training samples of the clients
BATCH, ROUNDS, EPOCHS, HEAD_EPOCHS = 2, 3, 2, 3
LR, MU, LAMBDA, INNER_LR, K, SERVER_LR, BETA = 0.125, 0.5, 15.0, 0.0625, 3, 1.5, 0.75

# Of each method: PFLlib's module and class of the server, and our settings.
PAIRS = {
    "fedavg": ("serveravg", "FedAvg", {}),
    "fedprox": ("serverprox", "FedProx", {"mu": MU}),
    "scaffold": ("serverscaffold", "SCAFFOLD", {}),
    "fedper": ("serverper", "FedPer", {}),
    "fedrep": ("serverrep", "FedRep", {"head_epochs": HEAD_EPOCHS}),
    "lg-fedavg": ("serverlg", "LG_FedAvg", {}),
    "ditto": ("serverditto", "Ditto", {"penalty": MU}),
    "per-fedavg": ("serverperavg", "PerAvg", {"inner_lr": LR, "variant": "first-order"}),
    "pfedme": ("serverpFedMe", "pFedMe", {
        "penalty": LAMBDA, "inner_steps": K, "personal_lr": INNER_LR, "weight_decay": 0.001,
    }),
}  # fmt: skip
OF_STRATEGIES = {
    "scaffold": {"server_lr": SERVER_LR},
    "lg-fedavg": {"fedavg_rounds": 0},
    "pfedme": {"server_beta": BETA},
}


class Net(nn.Module):
    """A body and a head, under the names that both programs know."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.base(x))


class Batches:
    """The mini-batches of a client, by how often they were asked for."""

    def __init__(self, client, x, y):
        self.client, self.x, self.y = client, x, y
        self.asked = 0

    def rows(self, size):
        """The next shuffled pass, in mini-batches of `size` rows."""
        generator = torch.Generator().manual_seed(100 * self.client + self.asked)
        self.asked += 1
        return list(torch.randperm(len(self.y), generator=generator).split(size))

    def loader(self, size=BATCH):
        """The same as mini-batches (x, y)."""
        return [(self.x[rows], self.y[rows]) for rows in self.rows(size)]


@pytest.fixture
def authors(monkeypatch):
    """PFLlib's modules of servers, by name; tensors are float64."""
    monkeypatch.syspath_prepend(str(FOLDER))
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    for name in UNUSED:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    yield lambda name: importlib.import_module(f"flcore.servers.{name}")
    torch.set_default_dtype(dtype)
    for name in list(sys.modules):
        if name.split(".")[0] == "flcore":
            del sys.modules[name]


def trained_by_pfllib(authors, method, model, data):
    """PFLlib's server after its rounds."""
    module, cls, _ = PAIRS[method]
    args = dict.fromkeys(OFF, 0) | {
        "model": deepcopy(model), "device": "cpu", "num_classes": 3, "batch_size": BATCH,
        "global_rounds": ROUNDS - 1, "local_epochs": EPOCHS, "plocal_epochs": EPOCHS,
        "local_learning_rate": LR, "num_clients": len(data), "join_ratio": 1.0, "eval_gap": 1,
        "time_threthold": float("inf"), "learning_rate_decay_gamma": 1.0, "mu": MU,
        "lamda": LAMBDA, "K": K, "p_learning_rate": INNER_LR, "server_learning_rate": SERVER_LR,
        "beta": BETA,
    }  # fmt: skip
    if method == "fedrep":
        args["plocal_epochs"] = HEAD_EPOCHS
    served = authors(module)
    sys.modules["flcore.servers.serverbase"].read_client_data = lambda _, i, **__: data[i].y
    server = getattr(served, cls)(SimpleNamespace(**args), 0)
    for client, batches in zip(server.clients, data, strict=True):
        client.load_train_data = lambda size=BATCH, batches=batches: batches.loader(size)
    for name in ("evaluate", "evaluate_one_step", "evaluate_personalized", "save_results",
                 "save_global_model"):  # fmt: skip
        setattr(server, name, lambda *_: None)
    server.rs_test_acc = server.rs_test_acc_per = [0.0]
    server.train()
    return server


def trained_here(method, model, data):
    """Our server's arrays and our clients after the same rounds."""
    entry = METHODS[method]
    strategy = entry.strategy(**OF_STRATEGIES.get(method, {}))
    nodes = [Node(i, 10 + i) for i in range(len(data))]
    strategy.training_nodes = lambda: nodes
    clients = []
    for batches in data:
        samples = Wide(batches.x, batches.y, torch.arange(len(batches.y)))
        held = replace(share(batches.x, batches.y), train=samples)
        client = entry.client(deepcopy(model), held, lr=LR, **PAIRS[method][2])
        client.rows = Feed(method, batches)
        clients.append(client)
    arrays = strategy.initialize(clients[0].arrays())
    arrays = train_rounds(strategy, arrays, clients, nodes, ROUNDS, {OWN_BODIES: True})
    return arrays, clients


class Feed:
    """Stands in for a client's `rows`: the passes that PFLlib's client makes over its loader."""

    def __init__(self, method, batches):
        self.method, self.batches = method, batches
        self.kept = []

    def __call__(self, config, kind="", **_):
        if self.method == "fedrep":  # one loader for both parts
            if kind == "head":
                self.kept = self.batches.rows(BATCH)
                return self.kept * HEAD_EPOCHS
            return self.kept * EPOCHS
        if self.method == "per-fedavg":  # a round trains twice, on halves of larger batches
            if kind == "inner":
                first = self.batches.rows(2 * BATCH) * EPOCHS
                self.kept = first + self.batches.rows(2 * BATCH) * EPOCHS
                return [rows[:BATCH] for rows in self.kept]
            return [rows[BATCH:] for rows in self.kept]
        return self.batches.rows(BATCH) * EPOCHS


def both(authors, method):
    """The initial network, PFLlib's server, our arrays and our clients."""
    model = Net()
    sizes = [8, 8] if method == "pfedme" else SIZES
    drawn = [(torch.randn(n, 1, 3, 3), torch.arange(n) % 3) for n in sizes]

    def data():
        return [Batches(i, x, y) for i, (x, y) in enumerate(drawn)]

    theirs = trained_by_pfllib(authors, method, model, data())
    arrays, clients = trained_here(method, model, data())
    return model, theirs, arrays, clients


def agree(found, expected):
    """The arrays are those of the network, to 1e-10."""
    for name, parameter in expected.named_parameters():
        array = torch.as_tensor(found[name])
        torch.testing.assert_close(array, parameter.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", PAIRS)
def test_the_shared_arrays(authors, method):
    """Of the server, after three rounds; the weights have moved."""
    model, theirs, arrays, _ = both(authors, method)
    shared = theirs.global_model
    prefix = {"fedper": "base.", "fedrep": "base.", "lg-fedavg": "head."}.get(method, "")
    agree({name.removeprefix(prefix): a for name, a in arrays.items()}, shared)
    start = dict(model.named_parameters())
    moved = [(p - start[prefix + name]).abs().max() for name, p in shared.named_parameters()]
    assert min(moved) > 1e-3


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lg-fedavg", "ditto"])
def test_the_personal_arrays(authors, method):
    _, theirs, _, clients = both(authors, method)
    for client, expected in zip(clients, theirs.clients, strict=True):
        if method == "ditto":
            agree(group(client.state, "own"), expected.model_per)
        elif method == "lg-fedavg":
            agree(dict(client.model.base.named_parameters()), expected.model.base)
        else:
            agree(dict(client.model.head.named_parameters()), expected.model.head)


def test_pfedmes_own_model_is_the_last_theta_and_pfllib_scores_the_servers_w(authors):
    """Theirs keeps references to the network's parameters, which the server's w replaces."""
    _, theirs, arrays, clients = both(authors, "pfedme")
    theirs.send_models()
    for client, other in zip(clients, theirs.clients, strict=True):
        for scored, w in zip(other.personalized_params, to_tensors(arrays).values(), strict=True):
            torch.testing.assert_close(scored.detach(), w, rtol=0, atol=1e-10)
        theta = to_tensors(group(client.state, "theta"))
        assert (theta["head.weight"] - to_tensors(arrays)["head.weight"]).abs().max() > 1e-3
