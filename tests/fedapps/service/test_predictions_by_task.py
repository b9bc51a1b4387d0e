"""What a served client gets where its labels are classes, several labels or values, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from clients.core.evaluation import Choice
from fedapps.results.card import Card
from fedapps.service.delivery import PersonalizationResult
from fedapps.service.inputs import read_input_files, unlabeled

CARD = Card("fedavg", "own", "mlp", (2,), ("0",), 1.0, task="values", target_mean=(50.0,),
            target_std=(10.0,))  # fmt: skip


def result(card, logits, labels=None):
    """What a client of this card receives for as many inputs of zeros."""
    inputs = unlabeled(torch.zeros(len(logits), 2), card)
    if labels is not None:
        inputs = replace(inputs, labels=labels)
    return PersonalizationResult(card, nn.Identity(), logits, inputs, {})


def test_values_have_the_labels_unit_and_their_error():
    """Outputs 0 and 1 are 50 and 60. The labels 53 and none: the error is 3."""
    labels = torch.tensor([[0.3], [math.nan]])
    got = result(CARD, torch.tensor([[0.0], [1.0]]), labels)
    assert got.predictions() == "sample,value\n0,50\n1,60\n"
    report = got.report()
    assert report["rmse"] == pytest.approx(3, abs=1e-5) == report["mae"]
    assert report["labels"].startswith("1 given")
    assert not {"accuracy", "entropy", "r2"} & report.keys()


def test_several_values_have_a_column_each():
    card = replace(CARD, classes=("0", "1"), target_mean=(0.0, 1.0), target_std=(1.0, 2.0))
    got = result(card, torch.tensor([[0.5, 0.5]]))
    assert got.predictions() == "sample,value 0,value 1\n0,0.5,2\n"
    assert "rmse" not in got.report()


def test_several_labels_have_a_column_each_and_their_probabilities():
    """σ(0) = 0.5 is no label, σ(ln 3) = 0.75 is one. Both right in one of two samples; TP 2, FP 0,
    FN 1: micro F1 4/5."""
    card = replace(CARD, classes=("cat", "=dog"), task="labels", target_mean=(), target_std=())
    z = torch.tensor([[0.0, math.log(3)], [math.log(3), -math.log(3)]])
    got = result(card, z, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    lines = got.predictions().splitlines()
    assert lines[0] == "sample,cat,'=dog,cat probability,'=dog probability"
    assert lines[1:] == ["0,0,1,0.500000,0.750000", "1,1,0,0.750000,0.250000"]
    report = got.report()
    assert (report["accuracy"], report["micro-f1"]) == (0.5, pytest.approx(0.8))


def test_the_second_of_two_classes_has_a_positive_output():
    card = replace(CARD, classes=("no", "yes"), task="binary", target_mean=(), target_std=())
    z = torch.tensor([[math.log(3)], [-math.log(3)]])
    got = result(card, z, torch.tensor([1, 1]))
    assert got.predictions() == "sample,class,probability\n0,yes,0.750000\n1,no,0.750000\n"
    assert got.report()["accuracy"] == 0.5


def test_later_values_in_a_file_are_standardised_as_the_runs(tmp_path):
    import numpy as np

    np.savez(tmp_path / "x.npz", x=np.zeros((2, 2), np.float32), y=[40.0, 65.5])
    inputs = read_input_files(tmp_path / "x.npz", CARD)
    assert inputs.labels.flatten().tolist() == pytest.approx([-1, 1.55])
    assert inputs.share.targets == CARD.targets
    assert inputs.share.everything.labels().isnan().all()
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 2), np.float32), y=np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"holds labels \(2, 3\); the run takes \(n, 1\)"):
        read_input_files(tmp_path / "x.npz", CARD)


def test_a_chosen_correction_stands_beside_each_prediction_and_in_the_report():
    card = replace(CARD, classes=("no", "yes"), task="binary", target_mean=(), target_std=())
    got = result(card, torch.tensor([[math.log(3)], [-math.log(3)]]))
    chosen = replace(got, choice=Choice("bn16", "Chose bn16: it helps"))
    header, first, _ = chosen.predictions().splitlines()
    assert (header, first) == ("sample,class,probability,correction", "0,yes,0.750000,bn16")
    report = chosen.report()
    assert (report["choice"], report["decision"]) == ("bn16", "Chose bn16: it helps")
    assert "choice" not in got.report()
