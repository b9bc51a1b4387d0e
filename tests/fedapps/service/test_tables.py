"""A later client's table: columns by name, unknown categories, other units, values."""

import json
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch

import partitions
from clients.core.evaluation import in_units
from fedapps.results.card import Card, make_card
from fedapps.results.reference import Reference, reference
from fedapps.service.delivery import PersonalizationResult
from fedapps.service.inputs import read_input_files, read_inputs
from fedapps.settings.config import defaults

ROWS = 40


def table():
    """Forty rows: two numbers, a category, and a label."""
    rows = np.arange(ROWS)
    columns = {
        "age": 40.0 + rows % 7,
        "dose": 0.5 * (rows % 5),
        "smoker": np.where(rows % 2 == 0, "yes", "no"),
        "label": np.where(rows % 3 == 0, "ill", "well"),
    }
    return pandas.DataFrame(columns)


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    return made(tmp_path_factory.mktemp("run"), table())


def made(folder, frame, **changes):
    """The card of a run on the frame."""
    frame.to_csv(folder / "d.csv", index=False)
    config = {
        "dataset": str(folder / "d.csv"),
        "partition": "iid",
        "num-clients": 2,
        "train-fraction": 1.0,
    }
    return make_card(defaults() | config | changes)


def given(inputs):
    """The inputs as the network gets them."""
    return inputs.share.everything[:][0]


def test_of_many_training_clients_evenly_spaced_ones_count(tmp_path, monkeypatch):
    """Of eight clients and at most three rows every third client counts: 0, 3 and 6, one row
    each."""
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).random((80, 3)), y=np.arange(80) % 2)
    config = {"dataset": str(tmp_path / "d.npz"), "partition": "iid", "num-clients": 8,
              "train-fraction": 1.0}  # fmt: skip
    federation = partitions.federation(defaults() | config)
    monkeypatch.setattr("fedapps.results.reference.MAX_ROWS", 3)
    shares = [federation.share(client).train for client in (0, 3, 6)]
    rows = torch.cat([share.x[share.index[:1]] for share in shares]).double()
    kept = reference(federation)
    assert kept.mean == pytest.approx(rows.mean(0).tolist())
    labels = torch.cat([share.labels() for share in shares])
    assert kept.shares == pytest.approx((labels.bincount() / len(labels)).tolist())


def test_columns_are_read_by_name_in_any_order(card, tmp_path):
    frame = table().drop(columns="label")
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame[["smoker", "dose", "age"]].to_csv(tmp_path / "b.csv", index=False, sep=";", decimal=",")
    first = read_input_files(tmp_path / "a.csv", card)
    second = read_input_files(tmp_path / "b.csv", card)
    assert torch.equal(given(first), given(second))
    assert torch.equal(given(first), given(read_inputs(frame[["dose", "smoker", "age"]], card)))
    rows = slice(0, 2)
    expected = (frame.age[rows].to_numpy() - card.mean[0]) / card.std[0]
    np.testing.assert_allclose(given(first)[rows, 0], expected, rtol=1e-6)
    assert given(first)[rows, 2:].tolist() == [[0, 1], [1, 0]]  # smoker=no, smoker=yes


def test_a_missing_column_is_named(card, tmp_path):
    table().drop(columns="dose").to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(ValueError, match="has no column dose, which the run was trained on"):
        read_input_files(tmp_path / "a.csv", card)


def test_further_columns_and_unknown_categories_are_reported(card):
    frame = table().drop(columns="label").assign(height=180, smoker="sometimes")
    inputs = read_inputs(frame, card)
    assert given(inputs)[:, 2:].sum() == 0
    unknown, further = inputs.notes
    assert "smoker has categories that the training clients do not have" in unknown
    assert "'sometimes' (40 rows)" in unknown
    assert further.endswith("columns that the run does not use: height")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"age": "old"}, "column age holds texts such as 'old'; the run takes a number"),
        ({"age": "41 years"}, "column age holds numbers with a unit"),
        (
            {"age": [np.nan] + [40] * 39},
            "column age has 1 cells without a value, the first in row 0",
        ),
        ({"smoker": 1.5}, "column smoker holds a number; the run takes one of the texts no, yes"),
    ],
)
def test_columns_of_another_kind_are_refused(card, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_inputs(table().assign(**changes), card)


def test_categories_of_one_row_are_no_identifiers(card):
    assert given(read_inputs(table().head(1), card))[0, 2:].tolist() == [0, 1]


def test_labels_are_read_by_the_runs_names(card):
    assert read_inputs(table(), card).labels[:4].tolist() == [0, 1, 1, 0]


def test_a_card_fits_into_a_message(tmp_path):
    """Sixty columns with names of 30 letters take more than a setting's 4096 characters."""
    numbers = np.random.default_rng(0).normal(size=(ROWS, 60)).round(1)
    names = [f"{name:030}" for name in range(60)]
    frame = pandas.DataFrame(numbers, columns=names).assign(label=table().label)
    wide = made(tmp_path, frame)
    line = wide.line()
    assert len(wide.text()) > 4096 >= len(line)
    kept = Card.parse(line)
    assert kept.encoding == wide.encoding and kept.mean == wide.mean
    for damaged in (line[:-40], line[:50] + "x" + line[51:]):
        with pytest.raises(ValueError, match="it is no run's card"):
            Card.parse(damaged)


def test_distances_are_in_deviations_of_the_training_rows():
    """Means 2 and 10, deviations 1 and 4: a client with means 5 and 2 is 3 above and 2 below. Of 16
    rows a mean may be off by 4 / √16 = 1 deviation more than the largest of the clients, 0.5."""
    kept = Reference(("a", "b", "constant"), (2.0, 10.0, 1.0), (1.0, 4.0, 0.0), 0.5)
    x = np.array([[4.0, 0.0, 3.0], [6.0, 4.0, 3.0]])
    assert kept.distances(x).tolist() == [3, -2, 0]
    assert kept.threshold(16) == 1.5


def test_a_unit_that_changed_is_a_warning(card):
    """Ages in months: about 12 times 43, where the deviation is about 2."""
    frame = table()
    as_in_training = report(card, frame)
    assert as_in_training["predicted"] == {"well": 40}
    assert "warning" not in as_in_training["inputs"]
    other = report(card, frame.assign(age=12 * frame.age))["inputs"]
    assert next(iter(other["farthest"])) == "age" and other["farthest"]["age"] > 100
    assert "inputs do not look like training: age:" in other["warning"]
    shown = f"40 of 40 are predicted well, {100 * card.reference.shares[1]:.0f} % in training"
    assert shown in other["warning"]


def report(card, frame):
    """The report of a network that always predicts the second class."""
    logits = torch.tensor([[0.0, 1.0]]).repeat(len(frame), 1)
    return PersonalizationResult(card, None, logits, read_inputs(frame, card), {}).report()


def test_values_are_delivered_in_their_own_unit(tmp_path):
    """Outputs of 0 and 1 are the mean and one deviation above it."""
    frame = table().assign(label=np.arange(ROWS) * 10.0 + 0.5)
    card = made(tmp_path, frame, task="values")
    logits = torch.tensor([[0.0], [1.0]])
    inputs = read_inputs(frame.head(2), card)
    result = PersonalizationResult(card, None, logits, inputs, {})
    mean, deviation = card.target_mean[0], card.target_std[0]
    expected = [mean, mean + deviation]
    assert in_units(logits, card.targets)[:, 0].tolist() == pytest.approx(expected)
    errors = [expected[0] - 0.5, expected[1] - 10.5]
    found = result.report()
    assert found["rmse"] == pytest.approx(np.sqrt((errors[0] ** 2 + errors[1] ** 2) / 2), rel=1e-5)
    assert found["predicted"] == {"label": pytest.approx(expected)}
    assert "entropy" not in found
    lines = result.predictions().splitlines()
    assert lines[0] == "sample,label" and float(lines[1].split(",")[1]) == pytest.approx(
        mean, rel=1e-5
    )
    json.dumps(found)


def test_with_privacy_no_statistics_are_kept(tmp_path):
    kept = made(tmp_path, table(), dp="central")
    assert kept.reference is None and replace(kept).encoding is not None


def test_an_array_for_a_table_is_taken_in_the_runs_order(tmp_path):
    """Its columns have no names, so the run's are said."""
    card = made(tmp_path, table().drop(columns="smoker"))
    np.savez(tmp_path / "later.npz", x=table()[["age", "dose"]].to_numpy())
    inputs = read_input_files(tmp_path / "later.npz", card)
    assert inputs.notes[-1].endswith("no columns; they are taken in the run's order: age, dose")
    assert torch.equal(given(inputs), given(read_inputs(table(), card)))


def test_a_run_on_other_inputs_refuses_texts(tmp_path):
    np.savez(
        tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(ROWS, 3)), y=np.arange(ROWS) % 2
    )
    config = {"dataset": str(tmp_path / "d.npz"), "partition": "iid", "num-clients": 2}
    card = make_card(defaults() | config)
    assert card.encoding is None and len(card.mean) == 3
    assert partitions.task(defaults() | config).shape == (3,)
    with pytest.raises(ValueError, match=r"column smoker holds texts; the run takes numbers of sh"):
        read_inputs(table().drop(columns="label"), card)


def test_a_later_clients_gap_names_what_the_client_can_do(card):
    """The run's settings are not the later client's."""
    frame = table().drop(columns="label")
    frame.loc[3, "dose"] = np.nan
    with pytest.raises(
        ValueError,
        match=r"dose has 1 cells without a value, .* row 3 .*the run was trained without "
        r"missing=mean, so it fills no gaps; fill them in, leave these rows out",
    ):
        read_inputs(frame, card)


@pytest.mark.parametrize("spelling", [("True", "False"), ("TRUE", "FALSE")])
def test_texts_true_and_false_are_categories_where_the_run_has_others(tmp_path, spelling):
    """pandas makes truth values of a column that holds no other texts, as of a few rows."""
    true, false = spelling
    texts = np.array([true, false, "unknown"])[np.arange(ROWS) % 3]
    card = made(tmp_path, table().assign(smoker=texts))
    names = card.encoding.outputs
    later = table()[:4].assign(smoker=[true, false, false, true])
    later.to_csv(tmp_path / "later.csv", index=False)
    x = given(read_input_files(tmp_path / "later.csv", card))
    assert x[:, names.index(f"smoker={true}")].tolist() == [1, 0, 0, 1]
    assert x[:, names.index(f"smoker={false}")].tolist() == [0, 1, 1, 0]
    assert x[:, names.index("smoker=unknown")].tolist() == [0] * 4


def test_truth_values_are_no_category_of_other_texts(tmp_path, card):
    later = table()[:4].assign(smoker=[True, False, False, True])
    with pytest.raises(ValueError, match="column smoker holds a truth value; the run takes one of"):
        read_inputs(later, card)


@pytest.mark.parametrize("rows", [[3], [8, 2, 5], [2, 3, 7]], ids=str)
def test_rows_that_pandas_wrote_with_their_numbers_are_served(tmp_path, card, rows):
    """The numbers have no name, and of some rows they do not count from row to row."""
    table().iloc[rows].to_csv(tmp_path / "later.csv")
    found = read_input_files(tmp_path / "later.csv", card)
    assert "columns that the run does not use: Unnamed: 0" in found.notes[-1]
    expected = given(read_inputs(table().iloc[rows], card))
    assert torch.equal(given(found), expected)


def test_a_files_ending_may_be_in_capitals(tmp_path, card):
    table().to_csv(tmp_path / "LATER.CSV", index=False)
    assert torch.equal(
        given(read_input_files(tmp_path / "LATER.CSV", card)), given(read_inputs(table(), card))
    )
