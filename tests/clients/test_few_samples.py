"""Clients of one or two samples: nothing is divided by zero, and what cannot be done is refused."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import ALL_SAMPLES, SMALL, federate, share, update
from torch import nn

from clients.core.cohort import Cohort
from clients.methods.pfedhn import PFedHNClient
from clients.methods.tent import TENTClient
from fedapps.planning import check
from partitions.datasets.loading import Dataset, Info
from partitions.federations import Federation
from strategies.core.evaluation import Evaluation
from strategies.core.replies import Node
from strategies.methods.fedavg import FedAvg

X, Y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])


def novel_of(x, y):
    return replace(share(x, y), novel=True)


def test_class_proportions_of_no_samples_are_refused():
    """Two samples of two classes leave no shot, as one of each class is kept for scoring."""
    few = novel_of(X, Y).with_shots(1, seed=0)
    assert not len(few.train)
    with pytest.raises(ValueError, match="no labels to train on"):
        PFedHNClient(nn.Linear(2, 2), few).describe({}, {})
    one = PFedHNClient(nn.Linear(2, 2), share(X[:1], Y[:1])).describe({}, {})[0]["descriptor"]
    assert one.tolist() == [1.0, 0.0]


def test_one_sample_and_batch_normalisation_is_refused_before_the_run(tmp_path):
    """Two samples a client; one validates."""
    x = np.random.default_rng(0).integers(0, 255, (8, 1, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "few.npz", x=x, y=np.arange(8) % 2)
    config = SMALL | ALL_SAMPLES | {"dataset": str(tmp_path / "few.npz"), "num-clients": 4}
    config |= {"partition": "iid", "model": "convnet-atp"}
    with pytest.raises(ValueError, match=r"a client has one sample to train on, and convnet-atp"):
        check(config | {"method": "fedavg"})


def test_inputs_without_a_deviation_cannot_be_standardised():
    x = torch.full((8, 1), 3.0)
    data = Dataset(Info("toy", (1,), 2, "", scale=1.0), x, torch.arange(8) % 2, 8, {})
    config = (
        SMALL
        | ALL_SAMPLES
        | {"num-clients": 2, "partition": "iid", "standardize": "training-clients"}
    )
    with pytest.raises(ValueError, match="all numbers in the training clients' inputs are equal"):
        Federation(config, data)


def test_no_part_of_the_inputs_is_a_single_one():
    """Three inputs in parts of at most 8 bytes, one input each: a part of one would have no batch
    statistics, and torch refuses it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.randn(3, 2)
    client = TENTClient(model, novel_of(x, torch.zeros(3).long()), pass_megabytes=8e-6)
    assert [len(part) for part in client.parts(x)] == [3]
    assert [len(part) for part in client.parts(x.repeat(2, 1)[:5])] == [3, 2]
    assert client.predict(x).isfinite().all()
    assert client.personal_model(x)(x).isfinite().all()


def test_each_warning_has_its_flag(caplog):
    """A run that is scored on few samples, and whose clients report no F1: both are said, once."""
    evaluation = Evaluation(FedAvg(selection_metric="macro-f1"))
    train = update(0, {}, 50, accuracy=0.5)
    novel = replace(update(1, {}, 3, accuracy=0.5), node=Node(1, 51, novel=True))
    with caplog.at_level(logging.WARNING, "flwr"):
        for _ in range(2):
            evaluation.metrics([train, novel])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert "no client reports macro-f1" in said[0] and "scored on 3 labeled samples" in said[1]


def test_a_novel_client_without_labels_is_not_told_to_take_fewer_shots(caplog):
    novel = replace(update(1, {}, 0), node=Node(1, 51, novel=True))
    with caplog.at_level(logging.WARNING, "flwr"):
        Evaluation(FedAvg()).metrics([update(0, {}, 50, accuracy=0.5), novel])
    (record,) = caplog.records
    assert record.getMessage().startswith("a novel client has no labels, or none beside its")


def test_a_cohort_that_was_warned_of_has_not_been_used():
    cohort = Cohort(2)
    cohort._alone = "the network has buffers"
    with pytest.warns(UserWarning, match="stacked-clients=2 has no effect"):
        cohort.warn_if_unused("fedavg")
    cohort.warn_if_unused("fedavg")  # an error if it warned again
    assert not cohort._used


@pytest.mark.parametrize("method", ["fedavg", "fedala", "per-fedavg", "scaffold", "hyperfedzero"])
def test_clients_of_two_samples_train_and_are_scored(method, tmp_path):
    x = np.random.default_rng(0).integers(0, 255, (8, 1, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "few.npz", x=x, y=np.arange(8) % 2)
    few = ALL_SAMPLES | {"dataset": str(tmp_path / "few.npz"), "num-clients": 4, "partition": "iid"}
    with np.errstate(divide="raise", invalid="raise"):
        result, _ = federate(**few, method=method)
    rounds = [*result.train_metrics_clientapp.values(), *result.evaluate_metrics_clientapp.values()]
    numbers = [value for metrics in rounds for value in metrics.values()]
    assert len(numbers) > 4 and np.isfinite(numbers).all()
