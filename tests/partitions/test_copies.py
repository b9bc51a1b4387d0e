"""Samples that occur twice are said, since copies of training samples are no test."""

import numpy as np
import pytest

from partitions.datasets.copies import note_on_copies
from partitions.datasets.loading import load
from partitions.datasets.readers.raw import Raw

COUNT = 40


def samples(copies):
    """40 samples; the last `copies` repeat the first ones."""
    x = np.random.default_rng(0).normal(size=(COUNT, 3))
    y = np.arange(COUNT) % 2
    x[COUNT - copies :] = x[:copies]
    y[COUNT - copies :] = y[:copies]
    return x, y


def test_copies_in_the_given_test_part_are_said():
    """The test part is the last quarter; 4 of its samples are copies."""
    note = note_on_copies(Raw(*samples(copies=4), num_train=30), "d.npz")
    assert note.startswith("d.npz: 4 of 10 validation and test samples equal a training sample")


def test_copies_without_a_given_part_are_said():
    note = note_on_copies(Raw(*samples(copies=4), num_train=COUNT), "d.npz")
    assert note.startswith("d.npz: 4 of 40 samples repeat another one")


@pytest.mark.parametrize("num_train", [30, COUNT])
def test_few_copies_and_other_labels_are_not_said(num_train):
    """1 of 40 is below a twentieth. An input with another label is no copy."""
    assert note_on_copies(Raw(*samples(copies=0), num_train), "d") == ""
    x, y = samples(copies=4)
    y[-4:] = 1 - y[:4]
    assert note_on_copies(Raw(x, y, num_train), "d") == ""
    if num_train == COUNT:
        assert note_on_copies(Raw(*samples(copies=1), num_train), "d") == ""


def test_rows_of_a_few_categories_are_no_copies():
    """Two columns of three values have nine combinations, for 40 rows."""
    x = np.random.default_rng(0).integers(0, 3, (COUNT, 2)).astype(float)
    assert note_on_copies(Raw(x, np.zeros(COUNT, int), COUNT), "d") == ""


@pytest.mark.usefixtures("own_cache")
def test_a_column_of_row_names_hides_no_copies(tmp_path, caplog):
    """Each row has a number of its own, which is no input."""
    x, y = samples(copies=20)
    lines = ["patient_id,a,b,c,label"]
    for number, (row, label) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        lines.append(",".join(map(str, [7000 + 3 * number, *row, label])))
    (tmp_path / "d.csv").write_text("\n".join(lines))
    load(str(tmp_path / "d.csv"))
    assert "20 of 40 samples repeat another one" in caplog.text
