"""A later client's data may have labels for some samples: these are scored, and all are served."""

from dataclasses import replace

import datasets
import numpy as np
import pandas
import pytest
import torch

from clients.core.evaluation import in_units
from fedapps.common.tasks import BINARY, CLASSES, LABELS, VALUES
from fedapps.results.card import Card, make_card
from fedapps.service.inputs import read_input_files, read_inputs
from fedapps.settings.config import defaults

ROWS = 40
SPLIT = {"partition": "iid", "num-clients": 2, "train-fraction": 1.0}
VECTOR = Card("tent", "mine", "mlp", (2,), ("-1", "1"), 1.0, 0.0, 1.0)


def table(labels):
    rows = np.arange(ROWS)
    return pandas.DataFrame({"age": 40.0 + rows % 7, "dose": 0.5 * (rows % 5)} | labels)


def made(folder, frame, **changes):
    """The card of a run on the frame."""
    frame.to_csv(folder / "d.csv", index=False)
    return make_card(defaults() | SPLIT | {"dataset": str(folder / "d.csv")} | changes)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("names", [("ill", "well"), (1, 2)], ids=str)
def test_rows_without_a_class_are_served_and_not_scored(tmp_path, caplog, ending, names):
    """Names are matched with the run's: rows 0 and 2 have none, the others are classes 1, 0, 1."""
    kinds = np.array(names)[np.arange(ROWS) % 2]
    card = made(tmp_path, table({"label": kinds}))
    later = table({"label": [None, names[1], None, *kinds[2:-1]]})
    path = tmp_path / f"later.{ending}"
    if ending == "csv":
        later.to_csv(path, index=False)
    else:
        later.to_parquet(path)
    found = read_input_files(path, card)
    assert found.labels[:6].tolist() == [-1, 1, -1, 0, 1, 0]
    assert len(found.names) == ROWS
    assert "column label: 2 of 40 samples have no label, and are not scored" in found.notes[0]
    assert "none of the run's" not in caplog.text


def test_an_empty_column_of_labels_is_none(tmp_path):
    card = made(tmp_path, table({"label": np.arange(ROWS) % 2}))
    found = read_inputs(table({"label": [np.nan] * ROWS}), card)
    assert found.labels.tolist() == [-1] * ROWS
    assert "40 of 40 samples have no label" in found.notes[0]


def test_rows_without_values_are_not_scored(tmp_path):
    card = made(tmp_path, table({"days": np.arange(ROWS) % 2 * 2.0}), label="days", task=VALUES)
    found = read_inputs(table({"days": [2.0, np.nan, *[0.0] * (ROWS - 2)]}), card)
    assert found.labels[1].isnan()
    in_days = in_units(found.labels.double(), card.targets).flatten()
    assert in_days[[0, 2]].tolist() == pytest.approx([2, 0], abs=1e-6)


def test_rows_that_lack_one_of_several_labels_are_not_scored(tmp_path):
    both = {"fever": np.arange(ROWS) % 2, "cough": np.arange(ROWS) // 2 % 2}
    card = made(tmp_path, table(both), label="fever,cough", task=LABELS)
    later = table(both).astype({"fever": float})
    later.loc[1, "fever"] = np.nan
    found = read_inputs(later, card)
    assert found.labels[1].isnan().all()
    assert found.labels[2:4].tolist() == [[0, 1], [1, 1]]


def test_a_sign_is_no_missing_label(tmp_path):
    """The class −1 is the first; the sample without a label has none."""
    path = tmp_path / "later.npz"
    np.savez(path, x=np.zeros((4, 2)), y=[-1.0, np.nan, 1.0, -1.0])
    assert read_input_files(path, VECTOR).labels.tolist() == [0, -1, 1, 0]


@pytest.mark.parametrize("task", [CLASSES, BINARY])
def test_texts_that_mark_a_missing_label_are_none(tmp_path, task):
    card = replace(VECTOR, classes=("no", "yes"), task=task)
    path = tmp_path / "later.npz"
    np.savez(path, x=np.zeros((4, 2)), y=["yes", "", "?", "no"])
    assert read_input_files(path, card).labels.tolist() == [1, -1, -1, 0]


def test_vectors_of_the_datasets_library_may_lack_labels(tmp_path):
    card = replace(VECTOR, classes=("0", "1"))
    content = {"x": np.zeros((3, 2)).tolist(), "label": [1, None, 0]}
    datasets.Dataset.from_dict(content).save_to_disk(tmp_path / "later")
    found = read_input_files(tmp_path / "later", card)
    assert torch.equal(found.labels, torch.tensor([1, -1, 0]))
