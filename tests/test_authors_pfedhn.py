"""Our pFedHN and class-fraction beside the authors' code, which FEDAPPS_AUTHORS_DIR/pFedHN holds
(github.com/AvivSham/pFedHN, commit 1bc0549). In float64, on the same weights, clients and batches.

FEDAPPS_AUTHORS_DIR=… pytest -n0 -m slow tests/test_authors_pfedhn.py"""

import os
import sys
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from small_runs import Wide, share

from clients.core.arrays import model_arrays, to_record
from clients.methods.pfedhn import PFedHNClient
from partitions.rules.class_fraction import ClassFractionPartitioner
from strategies.core.replies import Node, Update
from strategies.methods.pfedhn import PFedHN

FOLDER = Path(os.environ.get("FEDAPPS_AUTHORS_DIR", "/nowhere")) / "pFedHN"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="FEDAPPS_AUTHORS_DIR names no such folder"),
]
CLIENTS, SAMPLES, BATCH, INNER = 4, 12, 5, 3
RATES = {"lr": 0.01, "inner_lr": 0.005, "embed_lr": 0.02, "wd": 0.001, "inner_wd": 0.00005}
KINDS = ("weights", "bias")
SIZES = {"embed_dim": 3, "hyper_hid": 6, "n_hidden": 2, "n_kernels": 1}


@pytest.fixture
def authors(monkeypatch):
    """Their package, which has the name of ours."""
    ours = [name for name in sys.modules if name.split(".")[0] == "experiments"]
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(FOLDER))
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield lambda name: import_module(f"experiments.{name}")
    torch.set_default_dtype(dtype)
    theirs = [name for name in sys.modules if name.split(".")[0] == "experiments"]
    for name in theirs:
        del sys.modules[name]


class Draws:
    """A loader whose every iteration gives the next of the batches."""

    def __init__(self, x, y, rows):
        self.batches = iter([(x[row], y[row]) for row in rows])

    def __iter__(self):
        yield next(self.batches)


@pytest.mark.parametrize("steps", [1, 20])
def test_phi_and_the_embeddings(authors, monkeypatch, tmp_path, steps):
    """φ and every v_i after `steps` rounds of one client, also of clients that were not drawn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(CLIENTS, SAMPLES, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (CLIENTS, SAMPLES), generator=generator)
    order = np.random.default_rng(2).integers(0, CLIENTS - 1, steps).tolist()  # one never trains
    rows = [
        [torch.randperm(SAMPLES, generator=generator)[:BATCH] for _ in range(INNER)] for _ in order
    ]

    trainer = authors("pfedhn.trainer")
    made = []

    def hypernetwork(*args, **options):
        made.append(authors("pfedhn.models").CNNHyper(*args, **options))
        made.append(deepcopy(made[0]))
        return made[0]

    def nodes(*args, **options):
        by_client = {client: [] for client in range(CLIENTS)}
        for client, drawn in zip(order, rows, strict=True):
            by_client[client] += drawn
        train = [Draws(x[i], y[i], by_client[i]) for i in range(CLIENTS)]
        whole = [[(x[i], y[i])] for i in range(CLIENTS)]
        return SimpleNamespace(train_loaders=train, test_loaders=whole, val_loaders=whole)

    drawn = iter(order)
    monkeypatch.setattr(trainer, "CNNHyper", hypernetwork)
    monkeypatch.setattr(trainer, "BaseNodes", nodes)
    monkeypatch.setattr(trainer.random, "choice", lambda _: next(drawn))
    trainer.train(
        "cifar10", "", 2, CLIENTS, steps, INNER, "sgd", bs=BATCH, device="cpu", eval_every=1000,
        save_path=tmp_path, seed=0, **RATES, **SIZES,
    )  # fmt: skip
    theirs, start = made

    network = authors("pfedhn.models").CNNTarget(n_kernels=SIZES["n_kernels"])
    strategy = PFedHN(
        embedding_dim=3, hidden_dim=6, hidden_layers=2, server_lr=RATES["lr"], clip_norm=50.0,
        embedding_lr=RATES["embed_lr"], server_momentum=0.9, server_weight_decay=RATES["wd"],
        moved_embeddings="all",
    )  # fmt: skip
    strategy.open(None, to_record(model_arrays(network)), {})
    strategy.nodes = [Node(i, 10 + i) for i in range(CLIENTS)]
    strategy.ensure_embeddings(strategy.nodes)
    load(strategy.generator, start)
    for client, drawn_rows in zip(order, rows, strict=True):
        node = strategy.nodes[client]
        sent = strategy.broadcast({}, [node])[node]
        held = share(x[client], y[client])
        held = replace(held, train=Wide(x[client], y[client], torch.arange(SAMPLES)))
        ours = PFedHNClient(network, held, lr=RATES["inner_lr"], weight_decay=RATES["inner_wd"])
        ours.load(sent)
        ours.fit_locally({}, rows=drawn_rows)
        strategy.aggregate({}, [Update(node, ours.arrays(), SAMPLES, {})])

    expected = parameters_of(theirs, strategy.generator.network())
    for name, parameter in strategy.generator.network().named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-9)
    table = theirs.embeddings.weight.detach()
    assert (table - start.embeddings.weight.detach()).abs().min() > 1e-9
    for client, v in strategy.generator.embeddings.items():
        torch.testing.assert_close(v.detach(), table[client], rtol=0, atol=1e-9)


# Their heads in the order of the target network's arrays, as ours.
HEADS = [f"{layer}_{kind}" for layer in ("c1", "c2", "l1", "l2", "l3") for kind in KINDS]


def parameters_of(theirs, ours):
    """Their φ by the names of ours."""
    found = {}
    for name, array in theirs.mlp.named_parameters():
        found[f"trunk.{name}"] = array.detach()
    for number, head in enumerate(HEADS):
        for name, array in getattr(theirs, head).named_parameters():
            found[f"heads.{number}.{name}"] = array.detach()
    assert found.keys() == dict(ours.named_parameters()).keys()
    return found


def load(generator, theirs):
    """Start at their φ and v_i."""
    network = generator.network()
    network.load_state_dict(parameters_of(theirs, network))
    with torch.no_grad():
        for client, v in generator.embeddings.items():
            v.copy_(theirs.embeddings.weight[client])


def test_the_class_fraction_split(authors):
    """Ten clients, two of ten classes each: two holders of every class get a_1 + a_2 of the sum
    over three draws of U(0.4, 0.6), two thirds on average and 0.8 / 1.4 to 1.2 / 1.6."""
    dataset = authors("dataset")
    labels = np.repeat(np.arange(10), 300)
    samples = SimpleNamespace(targets=labels.tolist())
    dealt = {"theirs": [], "ours": []}
    for seed in range(30):
        np.random.seed(seed)
        split = dataset.gen_data_split(samples, 10, dataset.gen_classes_per_node(samples, 10, 2))
        held = [np.bincount(labels[rows], minlength=10) for rows in split]
        dealt["theirs"].append(np.array(held))
        rule = ClassFractionPartitioner(10, 2, seed, extra_holder=True)
        rule.dataset = Dataset.from_dict({"label": labels, "part": np.zeros(len(labels), int)})
        held = [np.bincount(labels[rule.rows(i)], minlength=10) for i in range(10)]
        dealt["ours"].append(np.array(held))
    for counts in dealt.values():
        of_class = np.array(counts).sum(1) / 300
        assert of_class.min() > 0.56 and of_class.max() < 0.76
        assert of_class.mean() == pytest.approx(2 / 3, abs=0.01)
        holds = np.array(counts) > 0
        assert holds.sum(1).max() == 2  # clients with a class
