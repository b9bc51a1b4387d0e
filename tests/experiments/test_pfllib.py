"""The splits and settings that PFLlib gets, and the network that it trains."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import partitions
from clients.models import build_model
from experiments.benchmarks import pfllib
from fedapps.settings.config import defaults, override
from fedapps.settings.experiments import read_experiment
from fedapps.settings.variants import Variant

ASKED = read_experiment("pfllib")
CONFIG = override(defaults(), ASKED.settings)


def read(file):
    """A file of samples, as PFLlib's `read_data` reads it."""
    return np.load(file, allow_pickle=True)["data"].tolist()


def test_an_export_holds_the_training_clients_samples(tmp_path):
    """Client i of PFLlib is our i-th training client: its dataset's rows, pixels over 16."""
    config = CONFIG | {"train-fraction": 0.5, "num-clients": 20, "seed": 3}
    federation = partitions.federation(config)
    pfllib.export(federation, tmp_path)
    training = [i for i in range(20) if not federation.novel[i]]
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "num_clients": len(training),
        "num_classes": 10,
    }
    seen = set()
    for position, client in enumerate(training):
        rows = federation.rows(client)
        for folder, part in (("train", "train"), ("test", "validation")):
            data = read(tmp_path / folder / f"{position}.npz")
            expected = federation.dataset.x.numpy()[rows[part]] / federation.info.scale
            assert np.array_equal(data["x"], expected.astype(np.float32)) and len(data["x"])
            assert np.array_equal(data["y"], federation.dataset.y.numpy()[rows[part]])
            assert seen.isdisjoint(rows[part])
            seen |= set(rows[part])
    assert not (tmp_path / "train" / f"{len(training)}.npz").exists()


def test_mini_batches_are_whole():
    """PFLlib drops the rest of a pass, so a client's 20 samples make two batches of ten."""
    federation = partitions.federation(CONFIG)
    sizes = {(len(s.train), len(s.validation)) for s in map(federation.share, range(50))}
    assert sizes == {(20, 15)} and CONFIG["batch-size"] == 10


@pytest.mark.parametrize("method", ASKED.methods.split(","))
def test_options_say_what_the_run_does(method):
    options = pfllib.flags(Variant.parse(method).apply(CONFIG))
    expected = {
        "fedrep": {"plocal_epochs": 5},
        "fedbabu": {"fine_tuning_epochs": 10, "global_rounds": 49, "eval_gap": 49},
        "ditto": {"mu": 0.1, "plocal_epochs": 5},
        "apfl": {"alpha": 0.5},
        "fedala": {"eta": 1.0, "rand_percent": 80, "layer_idx": 2},
        "fedamp": {"alphaK": 1.0, "sigma": 100.0, "lamda": 1.0},
    }
    assert options == {
        "algorithm": pfllib.ALGORITHMS[method],
        "device": "cpu",
        "model": "DNN",
        "num_clients": 50,
        "global_rounds": 50,
        "eval_gap": 50,
        "local_epochs": 5,
        "batch_size": 10,
        "local_learning_rate": 0.05,
    } | expected.get(method, {})


def test_the_network_is_ours_with_its_head_last():
    """FedALA of PFLlib mixes the last two arrays, others split at `fc`."""
    network, x = pfllib.Network(CONFIG | {"seed": 2}), torch.rand(4, 1, 8, 8)
    ours = build_model("mlp-small", (1, 8, 8), 10, 2)
    assert torch.equal(network(x), ours(x))
    assert [name for name, _ in network.named_parameters()][-2:] == ["fc.weight", "fc.bias"]


class Base:
    """As much of a client of PFLlib as the corrections use; F(w) = w for its one weight."""

    learning_rate, lamda, alphaK, alpha, local_epochs = 0.1, 2.0, 1.0, 0.5, 1

    def __init__(self, w, other):
        self.model, self.client_u, self.model_per = map(linear, (w, other, other))
        self.optimizer, self.optimizer_per = (
            torch.optim.SGD(model.parameters(), lr=0.1) for model in (self.model, self.model_per)
        )

    def load_train_data(self):
        return [(torch.ones(1, 1), None)] * 2

    def loss(self, output, y):
        return output.mean()

    def clone_model(self, model, target):
        target.load_state_dict(model.state_dict())

    def update_parameters(self, model, parameters):
        for p, new in zip(model.parameters(), parameters, strict=True):
            p.data = new.clone()

    def train(self):
        for x, y in self.load_train_data():
            self.optimizer.zero_grad()
            self.loss(self.model(x), y).backward()
            self.optimizer.step()

    def test_metrics(self):
        return weight(self.model_per)


def linear(value):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def weight(model):
    return pytest.approx(model.weight.item())


def test_corrected_fedamp_is_pulled_to_u():
    """From u = 1, λ/α = 2: 1 − 0.1 · 1 = 0.9, then 0.9 − 0.1 (1 + 2 (0.9 − 1)) = 0.82."""
    client = pfllib.amp_client(Base)(3.0, 1.0)
    client.train()
    assert weight(client.model) == 0.82
