"""What a later client may bring: every kind of data, on the run's scale, its labels kept apart."""

from dataclasses import replace

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedapps.results.card import Card
from fedapps.service.delivery import PersonalModel
from fedapps.service.inputs import read_input_files, read_inputs, unlabeled
from partitions.datasets.loading import Info
from partitions.shares import Samples, Share

CARD = Card("tent", "mine", "mlp", (1, 2, 2), ("ant", "bee", "cat"), 16.0, 0.5, 0.25)
ROWS = np.array([[[[0, 16], [4, 8]]], [[[2, 2], [2, 2]]]], np.uint8)
SEEN = (ROWS / 16 - 0.5) / 0.25  # what the network gets


def seen(inputs):
    return inputs.share.everything[:][0].numpy()


def test_whole_numbers_are_as_stored_and_others_scaled_already():
    """(v/16 − ½)/¼ of a stored v, (v − ½)/¼ of a v in [0, 1], (v/255 − ½)/¼ of a picture's."""
    whole = torch.from_numpy(ROWS)
    for given in (whole, torch.from_numpy(ROWS / np.float32(16)), whole[:, 0]):
        found = unlabeled(given, CARD)
        assert seen(found) == pytest.approx(SEEN)
        assert found.share.novel and not len(found.share.train)
        assert found.labels.tolist() == found.share.everything.y.tolist() == [-1, -1]
    picture = unlabeled(torch.from_numpy(ROWS), CARD, picture=True)
    assert seen(picture) == pytest.approx((ROWS / 255 - 0.5) / 0.25)


def test_truth_values_are_0_and_1_wherever_they_come_from(tmp_path):
    """(0 − ½)/¼ and (1 − ½)/¼, from a file, as an array, and in the delivered model. As whole
    numbers of a scale of 16 they would be nearly black."""
    truths = ROWS > 3
    np.save(tmp_path / "x.npy", truths)
    expected = (truths - 0.5) / 0.25
    for given in (truths, torch.from_numpy(truths), tmp_path / "x.npy"):
        assert seen(read_inputs(given, CARD)) == pytest.approx(expected)
    model = PersonalModel(torch.nn.Identity(), CARD, {})
    assert model(torch.from_numpy(truths)).numpy() == pytest.approx(expected)


@pytest.mark.parametrize("factor", [1.0, -1 / 16, 1.5 / 16])
def test_numbers_that_are_neither_whole_nor_scaled_are_refused(factor):
    """0 to 16 as floats would be served as sixteen times too bright, without a word."""
    with pytest.raises(ValueError, match=r"whole numbers .* from 0 to 16, or these divided by it"):
        unlabeled(torch.from_numpy(ROWS * np.float32(factor)), CARD)
    unlabeled(torch.from_numpy(ROWS * np.float32(factor)), replace(CARD, scale=1.0))


@pytest.mark.parametrize("value", [17, -1, 2**63])
def test_whole_numbers_outside_the_scale_are_refused(value, tmp_path):
    """Also in a file, and in a node's folder, unless the run takes any numbers."""
    x = ROWS.astype(np.uint64 if value > 0 else np.int64)
    x[1, 0, 0, 1] = value
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=r"run takes whole numbers .* from 0 to 16"):
        read_input_files(tmp_path / "x.npy", CARD)
    if value == 17:
        unlabeled(torch.from_numpy(x), replace(CARD, scale=1.0))
        every = Samples(torch.from_numpy(x).long(), torch.ones(2).long(), torch.arange(2), 16.0)
        Share(every, every, None, every, True).save(tmp_path, Info("mine", (1, 2, 2), 3, ""))
        with pytest.raises(ValueError, match=r"numbers from 0 to 17; .* from 0 to 16"):
            read_input_files(tmp_path, CARD)


def test_a_single_number_is_no_input():
    with pytest.raises(ValueError, match=r"inputs have shape \(\); the run takes"):
        unlabeled(torch.tensor(3), CARD)


def test_a_model_that_is_delivered_prepares_its_inputs_itself():
    """(v/16 − ½)/¼ of a stored v and (v − ½)/¼ of a v in [0, 1]; by channel, (v/16 − ⅛·c)/2ᶜ."""
    model = PersonalModel(torch.nn.Identity(), CARD, {})
    scaled = torch.from_numpy(ROWS / np.float32(16))
    for given in (torch.from_numpy(ROWS), scaled, scaled.double(), scaled[:, 0]):
        assert (found := model(given)).numpy() == pytest.approx(SEEN)
        assert found.dtype == torch.float32
    card = replace(CARD, shape=(2, 2, 2), mean=(0.125, 0.25), std=(2.0, 4.0))
    both = np.concatenate([ROWS, ROWS], 1)
    means, deviations = np.array([0.125, 0.25]), np.array([2.0, 4.0])
    expected = (both / 16 - means[:, None, None]) / deviations[:, None, None]
    found = PersonalModel(torch.nn.Identity(), card, {})(torch.from_numpy(both))
    assert found.numpy() == pytest.approx(expected)


def test_a_model_by_column_takes_scaled_inputs_as_they_are():
    """Bytes in columns: (v/255 − m)/s of a whole v, (v − m)/s of a v that is divided already."""
    card = replace(CARD, shape=(2,), scale=255.0, mean=(0.25, 0.5), std=(0.5, 2.0))
    model = PersonalModel(torch.nn.Identity(), card, {})
    rows = np.array([[0, 255], [51, 102]], np.uint8)
    expected = (rows / 255 - [0.25, 0.5]) / [0.5, 2.0]
    for given in (rows, (rows / 255).astype(np.float32), rows / 255, rows.astype(np.int64)):
        assert seen(read_inputs(given, card)) == pytest.approx(expected, abs=1e-6)
        assert model(torch.from_numpy(given)).numpy() == pytest.approx(expected, abs=1e-6)


def test_arrays_of_any_layout_are_inputs_of_a_run_and_of_its_model():
    """Views from behind, other byte orders and lists, which torch does not take as they are."""
    model = PersonalModel(torch.nn.Identity(), CARD, {})
    scaled = ROWS / 16
    backwards = np.ascontiguousarray(ROWS[..., ::-1])[..., ::-1]
    tensor = torch.from_numpy(scaled).requires_grad_()
    for given in (
        backwards,
        scaled.astype(">f4"),
        scaled.astype(np.longdouble),
        ROWS.tolist(),
        tensor,
    ):
        assert seen(read_inputs(given, CARD)) == pytest.approx(SEEN)
        assert model(given).detach().numpy() == pytest.approx(SEEN)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.ma.masked_equal(ROWS, 8), r"1 masked cells; fill them, as x.filled\(0\)"),
        (ROWS.astype(str), "inputs are an array of <U3, .*; they must be numbers"),
        (torch.from_numpy(ROWS / 16).cfloat(), "tensors of torch.complex64; give dense ones"),
        (torch.from_numpy(ROWS / 16).to_sparse(), "torch.sparse_coo tensors .*to_dense"),
        ({"age": [1, 2], "dose": [3, 4]}, r"dict of columns; give a table: pandas\.DataFrame\("),
    ],
    ids=["masked", "texts", "complex", "sparse", "columns"],
)
def test_arrays_that_are_no_numbers_name_what_to_give(given, words):
    """The values behind a mask and the imaginary parts were served, or left out, without a word."""
    with pytest.raises(ValueError, match=words):
        read_inputs(given, CARD)


@pytest.mark.parametrize("value", [16.0, np.nan])
def test_predictions_are_refused_where_personalize_refuses(value):
    model = PersonalModel(torch.nn.Flatten(), CARD, {})
    scaled = ROWS / np.float32(16)
    assert model.predict(torch.from_numpy(scaled)).tolist() == model.predict(ROWS).tolist()
    scaled[0, 0, 1, 1] = value
    with pytest.raises(ValueError, match=r"or these divided by it|the first in sample 0"):
        model.predict(scaled)


def test_two_columns_of_one_name_are_refused():
    table = pd.DataFrame([[1.0, 2.0, 3.0]], columns=["age", "dose", "age"])
    with pytest.raises(ValueError, match="DataFrame: two columns are called 'age'; rename one of"):
        read_inputs(table, replace(CARD, shape=(3,), scale=1.0))


def saved(folder):
    """The same two inputs in every form that the README names, and their labels: the second one is
    a bee. Whole numbers are those that the run's dataset stores, whatever their width."""
    np.save(folder / "x.npy", ROWS)
    np.savez(folder / "x.npz", x=ROWS, y=[7, 1])
    np.save(folder / "wide.npy", ROWS.astype(int))
    np.save(folder / "scaled.npy", ROWS / 16)
    flat = datasets.Dataset.from_dict({"x": ROWS.tolist(), "label": ["elk", "bee"]})
    flat.cast_column("x", datasets.Array3D((1, 2, 2), "uint8")).save_to_disk(str(folder / "saved"))
    without = {name: [-1, -1] for name in ("x.npy", "wide.npy", "scaled.npy")}
    return {**without, "x.npz": [-1, 1], "saved": [-1, 1]}


def test_a_tables_column_of_labels_is_the_runs(tmp_path):
    card = replace(CARD, shape=(2,), scale=1.0, mean=0.0, std=1.0, label="kind")
    for text, labels in (("a,kind,b\n1,bee,4\n2,elk,8\n", [1, -1]), ("a,b\n1,4\n2,8\n", [-1, -1])):
        (tmp_path / "x.csv").write_text(text)
        found = read_input_files(tmp_path / "x.csv", card)
        assert (seen(found).tolist(), found.labels.tolist()) == ([[1, 4], [2, 8]], labels)


def test_files_of_every_kind(tmp_path):
    """A label that is none of the run's classes is none; texts match class names."""
    for name, labels in saved(tmp_path).items():
        found = read_input_files(tmp_path / name, CARD)
        assert seen(found) == pytest.approx(SEEN), name
        assert found.labels.tolist() == labels, name
        assert found.share.everything.y.tolist() == [-1, -1]  # in no client's reach
        assert found.names == ["0", "1"] and found.scored.all()


def test_folders_of_pictures_are_named_by_the_runs_classes(tmp_path):
    """`cat` is the run's class 2 though the folder's 0; `dog` is none. A red of 200 is grey
    0.299 · 200 = 59.8, 60; a grey picture becomes three alike channels where the run has three."""
    for name, colour in (("cat", (200, 0, 0)), ("dog", (10, 10, 10))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4), colour).save(tmp_path / name / "0.png")
    found = read_input_files(tmp_path, CARD)
    assert found.names == ["cat/0.png", "dog/0.png"] and found.labels.tolist() == [2, -1]
    assert found.share.everything.x[:, 0, 0, 0].tolist() == [60, 10]
    colours = Card("tent", "mine", "mlp", (3, 2, 2), ("ant",), 255.0)
    np.save(tmp_path / "grey.npy", ROWS)
    grey = read_input_files(tmp_path / "grey.npy", colours).share.everything.x
    assert grey.shape == (2, 3, 2, 2) and torch.equal(grey[:, 0], grey[:, 2])


def test_a_digest_is_of_the_inputs_alone(tmp_path):
    one, other = torch.from_numpy(ROWS), torch.from_numpy(ROWS[::-1].copy())
    plain = unlabeled(one, CARD).digest()
    assert unlabeled(one, CARD, labels=torch.tensor([0, 1])).digest() == plain
    assert unlabeled(other, CARD).digest() != plain


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e39])
def test_values_that_are_not_finite_are_refused(tmp_path, value):
    """Two of them, in the second sample; −10³⁹ is no float32. As an array, and in a node's folder,
    where they may be a training client's."""
    x = torch.from_numpy(ROWS / 16)
    x[1, 0, 0] = value
    got = "holds 2 values that are NaN, infinite or too large, the first in sample 1; fill them in"
    with pytest.raises(ValueError, match=f"the array {got}"):
        unlabeled(x, CARD)
    every = Samples(x, torch.tensor([0, 1]), torch.arange(2), 1.0, 0.5, 0.25)
    info = Info("mine", (1, 2, 2), 3, "")
    for novel in (True, False):
        Share(every, every, None, every, novel).save(tmp_path / "node", info)
        with pytest.raises(ValueError, match=f"node {got}"):
            read_input_files(tmp_path / "node", CARD)
