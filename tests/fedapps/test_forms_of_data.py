"""Files in the forms in which people have data: each is learnt and served under its own names, or
refused by the sentence that says what to write."""

import csv
import io

import numpy as np
import pytest
from forms_of_data import ARRAYS, CLASSES, LABELS, VALUES, array_file, leaf_file, table_file
from own_files import configuration, rows_of, trained
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import partitions
from fedapps.planning import configured
from fedapps.service.finished_run import load
from fedapps.settings.experiments import read_arguments

pytestmark = pytest.mark.usefixtures("own_cache")
TABLE = {"label": "diagnosis", "missing": "mean", "rounds": 5}


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def federation_of(path, **changes):
    return partitions.federation(configuration(path, **changes))


def run_in(folder, path, **changes):
    """The scores of a run, its federation, and the run that serves later clients."""
    scores, federation = trained(path, **{"output-dir": str(folder), **changes})
    return scores, federation, load(folder)


def predictions(run, data):
    """The rows of predictions.csv by the columns' names."""
    result = run.serve(run.inputs(data))
    return list(csv.DictReader(io.StringIO(result.predictions())))


CLASS_NAMES = {
    "y-one-hot": ("0", "1", "2"),
    "y-column": ("0", "1", "2"),
    "y-whole-decimals": ("0", "1", "2"),
    "y-words": ("ash", "birch", "cedar"),
    "y-from-one": ("1", "2", "3"),
    "y-truth-values": ("False", "True"),
    "y-signs": ("-1", "1"),
}


@pytest.mark.parametrize("form", CLASS_NAMES)
def test_classes_are_learnt_and_predicted_by_their_names(form, tmp_path, caplog):
    path = array_file(tmp_path, form)
    names = CLASS_NAMES[form]
    scores, federation, run = run_in(tmp_path / "run", path)
    assert federation.line.endswith(f"{len(names)} classes")
    assert not (federation.dataset.y < 0).any()
    assert scores["novel-accuracy"] >= 0.8
    said = [row["class"] for row in predictions(run, path)]
    truth = CLASSES if len(names) == 3 else (LABELS[form] > 0).astype(int)
    right = [name == names[number] for name, number in zip(said, truth, strict=True)]
    assert set(said) == set(names) and np.mean(right) >= 0.8
    if form == "y-one-hot":
        assert "labels are one-hot: 3 classes" in caplog.text


def test_several_labels_and_values_are_learnt_and_served(tmp_path, caplog):
    path = array_file(tmp_path, "y-several")
    scores, federation, run = run_in(tmp_path / "labels", path, rounds=10)
    assert federation.line.endswith("4 labels, several at once")
    assert "task labels" in caplog.text
    assert scores["novel-micro-f1"] > 0.6
    assert set(predictions(run, path)[0]) > {"label 0", "label 3"}

    path = array_file(tmp_path, "y-values")
    scores, federation, run = run_in(tmp_path / "values", path, rounds=10, lr=0.05)
    assert "task values (regression)" in caplog.text
    assert scores["novel-r2"] > 0.9
    served = [float(row["value"]) for row in predictions(run, path)]
    assert r2_score(VALUES, served) > 0.9


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("y-one-missing", {}, r"row 9 has no label \(nan\); fill it in, or leave the row out"),
        ("y-masks", {}, "as masks have; segmentation is not served"),
        ("x-windows", {}, "set inputs=signal for 6 channels of 20 steps each, or inputs=image"),
        ("x-tokens", {}, "set inputs=tokens if they number words .* or inputs=vector"),
        (
            "x-few",
            {"num-clients": 18, "partition.test-fraction": 0.2},
            "client 0 has 2 samples .*; use fewer clients than num-clients=18",
        ),
    ],
)
def test_what_is_not_understood_names_what_to_write(form, changes, words, tmp_path):
    path = array_file(tmp_path, form)
    with pytest.raises(ValueError, match=rf"{words}"):
        federation_of(path, **changes)


def test_one_sample_without_a_label_is_left_out_by_its_row(tmp_path, caplog):
    federation = federation_of(array_file(tmp_path, "y-one-missing"), **{"skip-broken": 0.01})
    assert len(federation.dataset.y) == len(CLASSES) - 1
    assert "row 9 has no label" in caplog.text


def test_declared_windows_tokens_and_bytes_are_what_they_are(tmp_path):
    windows = federation_of(array_file(tmp_path, "x-windows"), inputs="signal")
    assert "signals of 6 channels and 20 steps scaled by" in windows.line
    assert windows.share(0).train[:][0].shape[1:] == (6, 20)

    path = array_file(tmp_path, "x-tokens")
    tokens = federation_of(path, inputs="tokens")
    given = np.concatenate([tokens.share(client).everything[:][0] for client in range(4)])
    assert given.dtype == np.int64
    assert sorted(given.ravel().tolist()) == sorted(ARRAYS["x-tokens"][0].ravel().tolist())

    images = federation_of(array_file(tmp_path, "x-bytes-nhwc"))
    assert "images of 3 channels and 8×8 pixels" in images.line
    pixels = images.share(0).everything[:][0]
    assert 0.9 < float(pixels.max()) <= 1 and float(pixels.min()) < 0.1


def test_columns_of_all_scales_are_learnt_as_well(tmp_path):
    scores, federation = trained(array_file(tmp_path, "x-scales"))
    assert "7 columns scaled by the training clients' statistics, 3 classes" in federation.line
    usual, _ = trained(array_file(tmp_path, "y-column"))
    assert scores["novel-accuracy"] >= usual["novel-accuracy"] - 0.05


@pytest.fixture(scope="module")
def hospital_run(tmp_path_factory, own_cache):
    """A run on the table whose two training clients are hospitals."""
    folder = tmp_path_factory.mktemp("hospitals")
    natural = {"partition": "natural", "partition.column": "hospital", "num-clients": 3}
    return run_in(folder / "run", table_file(folder, "table"), **TABLE, **natural)


@pytest.mark.parametrize("name", ["table", "table-semicolon-comma", "table-latin1"])
def test_tables_are_divided_by_hospital(name, tmp_path, caplog):
    owner = "Krankenhäuser" if name == "table-latin1" else "hospital"
    changes = {"partition": "natural", "partition.column": owner, "num-clients": 3}
    path = table_file(tmp_path, name)
    federation = federation_of(path, **TABLE, **changes)
    features = [feature.name for feature in federation.encoding.features]
    assert "mean area" in features and "smoker" in features
    assert owner not in features and "patient_id" not in features
    assert "column patient_id is left out" in caplog.text
    sizes = [len(federation.rows(client)["train"]) for client in range(3)]
    assert min(sizes) > 100
    with pytest.raises(ValueError, match=r"column mean texture has 28 cells .* missing=mean"):
        federation_of(path, label="diagnosis", **changes)


def test_a_hospitals_table_is_learnt(hospital_run):
    scores, federation, _ = hospital_run
    assert "30 numeric columns" in federation.line and "1 of categories" in federation.line
    assert scores["novel-accuracy"] >= 0.93


def test_a_column_of_units_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"column mean area holds numbers with a unit"):
        federation_of(table_file(tmp_path, "table-units"), **TABLE)


def later(run, folder, name):
    """A later hospital's inputs, and what it is served."""
    inputs = run.inputs(table_file(folder, name))
    return inputs, run.serve(inputs)


def test_later_other_order_has_the_same_predictions(hospital_run, tmp_path):
    _, usual = later(hospital_run[2], tmp_path, "later")
    _, other = later(hospital_run[2], tmp_path, "later-other-order")
    assert other.predictions() == usual.predictions()
    assert "warning" not in usual.report()["inputs"]


def test_later_missing_column_is_named(hospital_run, tmp_path):
    with pytest.raises(ValueError, match="mean texture"):
        later(hospital_run[2], tmp_path, "later-missing-column")


def test_later_new_category_is_served_and_reported(hospital_run, tmp_path):
    inputs, result = later(hospital_run[2], tmp_path, "later-new-category")
    assert any("sometimes" in note for note in inputs.notes)
    assert len(result.predictions().splitlines()) == 41


def test_later_other_unit_is_a_warning(hospital_run, tmp_path):
    _, result = later(hospital_run[2], tmp_path, "later-other-unit")
    report = result.report()["inputs"]
    assert next(iter(report["farthest"])) == "mean area"
    assert "inputs do not look like training: mean area:" in report["warning"]


def test_users_of_leaf_are_clients_and_characters_tokens(tmp_path):
    path = leaf_file(tmp_path)
    config, _ = configured(read_arguments([f"dataset={path}", "model=char-lstm"]))
    federation = partitions.federation(config)
    assert federation.line == "20 rows, 9 characters each, 4 classes"
    users = federation.dataset.columns["user"]
    held = []
    for client in range(5):
        rows = federation.share(client).everything.index.numpy()
        held.append(sorted(set(users[rows])))
    assert sorted(held) == [[f"user{number}"] for number in range(5)]
    changes = {"model": "char-lstm", "partition": "natural", "num-clients": 5, "local-steps": 1}
    scores, _ = trained(path, rounds=1, **changes)
    assert 0 <= scores["novel-accuracy"] <= 1


def test_iris_is_learnt(tmp_path):
    scores, _ = trained(table_file(tmp_path, "iris"), label="target", rounds=10)
    assert scores["novel-accuracy"] >= 0.93


def test_diabetes_is_as_good_as_ridge(tmp_path):
    path = table_file(tmp_path, "diabetes")
    with pytest.raises(ValueError, match=r"214 different whole numbers .*; set task=values"):
        federation_of(path, label="target")
    changes = {"label": "target", "task": "values", "model": "softmax", "lr": 0.02}
    scores, federation = trained(path, rounds=10, **changes)
    training, novel = rows_of(federation)
    cells = federation.dataset.x.numpy()
    y = federation.dataset.y.numpy()
    ridge = make_pipeline(StandardScaler(), Ridge()).fit(cells[training], y[training])
    rows = np.concatenate(novel)
    assert scores["novel-r2"] > r2_score(y[rows], ridge.predict(cells[rows])) - 0.03
