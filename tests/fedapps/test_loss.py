"""The loss of a user's own, which every method uses wherever it compares outputs with labels."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

import fedapps
from clients.core.arrays import from_record
from clients.methods._preferences import GlobalClient
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS

SHAPE, CLASSES, CONSTANT = (1, 4, 4), 3, 7.0
TAKE_ANY = [name for name, m in METHODS.items() if not issubclass(m.client, GlobalClient)]
# What learns from labels beside the loss: FedADG's generator makes features of the labels' classes,
# FedSR draws features to a Gaussian of their class, PeFLL's encoder describes a client by labels.
OTHER_USE = {"fedadg", "fedsr", "pefll"}
TINY = {
    "pfedhn": {"hidden_dim": 4},
    "pfedhn-pc": {"hidden_dim": 4},
    "odpfl-hn": {"hidden_dim": 4},
    "fedmd": {"novel_digest_epochs": 1},
    "heterotent": {"novel_digest_epochs": 1},
    "heterofedtta": {"novel_digest_epochs": 1},
    "fedtta++": {"max_steps": 3},
    "fedtta++-guarded": {"max_steps": 3},
    "shot": {"adapt_steps": 2},
    "fedthe": {"mixing_steps": 2},
    "fedthe+": {"views": 2, "adapt_steps": 1, "mixing_steps": 2},
    "fedrep": {"head_epochs": 2},
    "memo": {"views": 2},
    "auto": {"alpha": 0.5},  # two clients certify no less than 1/3
    "lg-fedavg": {"fedavg_rounds": 1},
    "fedbabu": {"tune_epochs": 1},
}


def network():
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(32, CLASSES))


def plain():
    """Without batch normalisation, which FedMA refuses."""
    layers = {"flat": nn.Flatten(), "first": nn.Linear(16, 4), "relu": nn.ReLU()}
    return nn.Sequential(OrderedDict(layers | {"head": nn.Linear(4, CLASSES)}))


def constant(logits, labels):
    """Nothing to learn."""
    return CONSTANT + 0.0 * logits.sum()


def run_with(method, loss, shift=0, model=None):
    """The arrays and states after two rounds, and the metrics, where labels are shifted by `shift`;
    without weight decay."""
    x = torch.rand(40, *SHAPE, generator=torch.Generator().manual_seed(0))
    y = (torch.arange(40) + shift) % CLASSES

    def data(context):
        rows = slice(20 * context.node_config["partition-id"], None)
        return (x[rows][:14], y[rows][:14]), (x[rows][14:20], y[rows][14:20])

    settings = {"local_steps": 2, "batch_size": 7, "seed": 1, "weight_decay": 0.0}
    settings |= TINY.get(method, {})
    model = model or (plain if method == "fedma" else network)
    public = torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(1))
    client = fedapps.client_app(
        method, model=model, data=data, loss=loss, public=lambda: public, **settings
    )
    found = []
    server = fedapps.server_app(
        method, model=model, shape=SHAPE, rounds=2, min_available_nodes=2,
        then=lambda *result: found.extend(result), **settings,
    )  # fmt: skip
    grid = InProcessGrid(client, {}, [{"partition-id": i} for i in range(2)])
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    result, strategy = found
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]  # every round, as in Flower
    assert strategy.now.failure == "" or result.train_metrics_clientapp[2]["valid-replies"] == 2
    arrays = from_record(result.arrays)
    for node, context in grid.contexts.items():
        for name, record in context.state.array_records.items():
            for key, array in from_record(record).items():
                arrays[f"{node} {name} {key}"] = array
    return arrays, result


def same(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert np.array_equal(array, other[name], equal_nan=True), name


@pytest.mark.parametrize("method", TAKE_ANY)
def test_labels_count_by_the_loss_alone(method):
    """With a constant loss other labels change no array, of the server or of a client, and the loss
    of every evaluation is that constant."""
    arrays, result = run_with(method, constant)
    if method not in OTHER_USE:
        others, _ = run_with(method, constant, shift=1)
        same(arrays, others)
    for metrics in result.evaluate_metrics_clientapp.values():
        losses = {name: value for name, value in metrics.items() if name.endswith("loss")}
        assert losses and set(losses.values()) == {CONSTANT}, losses


PURE = ("fedavg", "fedprox", "apfl", "fedala", "ditto", "fedper", "fedrep", "per-fedavg", "atp")


@pytest.mark.parametrize("method", PURE)
def test_with_a_constant_loss_nothing_moves(method):
    """These methods minimise nothing else."""
    arrays, _ = run_with(method, constant, model=plain)
    torch.manual_seed(1)
    start = {name: t.numpy() for name, t in plain().state_dict().items()}
    compared = 0
    for full, array in arrays.items():
        group, _, name = full.rpartition(" ")[2].rpartition("/")
        if name in start and group != "mixing":  # FedALA's weights
            np.testing.assert_allclose(array, start[name], rtol=1e-6, err_msg=full)
            compared += 1
    assert compared >= 2


def test_a_loss_that_is_no_number_is_named():
    """One without a mean over 7 samples of three classes; a class, which makes losses."""
    with pytest.raises(RuntimeError, match=r"a tensor \(7,\) for logits \(7, 3\) and labels"):
        run_with("fedavg", nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match=r"loss= is <class .*or a module such as"):
        run_with("fedavg", nn.CrossEntropyLoss)


def test_a_losss_own_tensors_are_used():
    """Weights of classes change what is learnt; torch's module without any is the default."""
    weighted, _ = run_with("fedavg", nn.CrossEntropyLoss(weight=torch.tensor([9.0, 1.0, 1.0])))
    usual, _ = run_with("fedavg", nn.CrossEntropyLoss())
    default, _ = run_with("fedavg", None)
    same(usual, default)
    assert any(not np.array_equal(weighted[name], a) for name, a in usual.items())
