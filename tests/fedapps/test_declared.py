"""Data in the forms that people have them: each is learnt, or refused by what to write."""

import numpy as np
import pandas as pd
import pytest
from own_files import configuration, trained
from sklearn.datasets import load_wine

import partitions
from fedapps.planning import check, configured, make_jobs
from fedapps.settings.experiments import Experiment, read_arguments
from partitions.datasets.loading import configured as loaded
from partitions.datasets.loading import described

ROWS = 300
X = np.random.default_rng(7).normal(size=(ROWS, 6)).astype(np.float32)
Y = X[:, :3].argmax(1)
WORDS = np.array(["setosa", "versicolor", "virginica"])
TABLE = pd.DataFrame(X[:, :5].astype(float), columns=list("abcde"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))


def array_file(folder, x=X, y=Y, name="d"):
    np.savez(folder / f"{name}.npz", x=x, y=y)
    return folder / f"{name}.npz"


def table_file(folder, **columns):
    path = folder / "d.csv"
    (TABLE.assign(**columns)).to_csv(path, index=False)
    return path


def line(path, **changes):
    """What a run says about the data."""
    return partitions.federation(configuration(path, **changes)).line


CLASSES = {
    "one-hot": (np.eye(3, dtype=np.int8)[Y], ()),
    "one-hot truth values": (np.eye(3)[Y] == 1, ()),
    "a column": (Y[:, None], ()),
    "whole decimals": (Y.astype(float), ()),
    "from 1": (Y + 1, ("1", "2", "3")),
    "texts": (WORDS[Y], tuple(WORDS)),
    "bytes": (WORDS.astype("S")[Y], tuple(WORDS)),
    "truth values": (Y > 0, ("False", "True")),
    "signs": (np.sign(Y - 0.5).astype(np.int64), ("-1", "1")),
    "unsigned": (Y.astype(np.uint64), ()),
}


@pytest.mark.parametrize("form", CLASSES)
def test_classes_keep_their_names(form, tmp_path):
    y, names = CLASSES[form]
    found = loaded(configuration(array_file(tmp_path, y=y)))
    assert found.classes == names
    assert found.info.task == "classes"
    assert found.info.num_classes == (len(names) or 3)
    expected = Y if found.info.num_classes == 3 else Y > 0
    assert found.y.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.where(np.arange(ROWS) == 9, np.nan, Y), "row 9 has no label .*; fill it in, or leave"),
        (np.where(np.arange(ROWS) == 9, np.inf, Y), "row 9 has the label inf, one of 1 .*fill"),
        (np.where(np.arange(ROWS) == 9, np.inf, X[:, 0]), "row 9 has the label inf"),
        (np.zeros((ROWS, 12, 12), int), "as masks have; segmentation is not served"),
        (Y - 3, r"row \d+ has the label -3; number the classes from 0 on, give them as texts"),
        (np.full(ROWS, 7), "all 300 samples have the label 7; .* add samples of another class"),
        (np.full(ROWS, "a"), "all 300 samples have the label a; .* add samples of another class"),
        (np.array([b"a", b"\xff"])[Y % 2], "bytes that are no ASCII text.*np.char.decode"),
        (np.array(["a", 1], object)[Y % 2], r"Python objects, .*: save texts as np.array\(texts"),
        (np.where(np.eye(3)[Y] == 1, np.nan, 0), "row 0, column . of the labels is nan, one of"),
        (X[:, :2] * 0 + [2, 3], "2 columns of whole numbers; set task=values .* task=labels"),
        (np.array([f"{n} mm" for n in range(ROWS)]), "300 different texts .* set task=classes if"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_read_name_what_to_write(y, words, tmp_path):
    with pytest.raises(ValueError, match=rf"d\.npz.*{words}"):
        partitions.federation(configuration(array_file(tmp_path, y=y)))


def test_a_value_that_float32_does_not_have_is_refused(tmp_path):
    path = array_file(tmp_path, y=X[:, 0].astype(float) * 1e200)
    with pytest.raises(ValueError, match=r"d\.npz: labels go up to .*; give them in a larger unit"):
        loaded(configuration(path, task="values"))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (X[:, 0], r"inputs are float32 \(300,\).*x\[:, None\]"),
        (X[:, :0], r"inputs are float32 \(300, 0\)"),
        (X + 1j, "inputs are complex64 .*; numbers .* are needed, or a table"),
        (X.astype("U8"), "inputs are <U8 .* or a table"),
        (X.astype(float) * 1e300, r"inputs hold numbers up to .*; give them in a larger unit"),
        (X.astype(float) * 1e-300, r"inputs hold no number above .*; give them in a smaller unit"),
        (np.where(np.arange(6) == 2, np.inf, X), "NaN or infinity, the first in sample 0; fill"),
        (np.zeros((ROWS, 6, 5)) + 0.5, "set inputs=signal for 6 channels .* or inputs=image"),
        (np.arange(ROWS * 4).reshape(ROWS, 4), "set inputs=tokens if .*, or inputs=vector"),
        (np.zeros((ROWS, 4, 4, 5)), "of 5 channels, write the channels first.*inputs=image"),
        (np.full((ROWS, 6, 6), 4000, np.uint16), "from 4000 to 4000; give bytes from 0 to 255"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_read_name_what_to_write(x, words, tmp_path):
    path = array_file(tmp_path, x=x)
    with pytest.raises(ValueError, match=rf"d\.npz: .*{words}"):
        partitions.federation(configuration(path))


def test_other_forms_of_inputs_are_read(tmp_path):
    truths = loaded(configuration(array_file(tmp_path, x=X > 0)))
    assert truths.x.unique().tolist() == [0, 1]
    half = loaded(configuration(array_file(tmp_path, x=X.astype(np.float16), name="half")))
    assert half.x.shape == X.shape
    pixels = np.arange(ROWS * 4 * 4).reshape(ROWS, 4, 4) % 256
    for kind in (np.uint16, np.float32):
        path = array_file(tmp_path, x=pixels[..., None].astype(kind), name=kind.__name__)
        images = loaded(configuration(path))
        assert (images.info.scale, images.info.shape) == (255, (1, 4, 4))
        assert images.x[0].flatten().tolist() == list(range(16))


def test_a_client_without_a_training_sample_is_named(tmp_path):
    path = array_file(tmp_path, x=X[:36], y=Y[:36])
    config = configuration(path) | {"num-clients": 18, "partition.test-fraction": 0.2}
    with pytest.raises(ValueError, match=r"client 0 has 2 samples .*; use fewer clients than num-"):
        partitions.federation(config)


def test_a_network_that_takes_no_tokens_is_refused_before_the_run(tmp_path):
    path = array_file(tmp_path, x=np.arange(ROWS * 4).reshape(ROWS, 4) % 9)
    with pytest.raises(
        ValueError, match=r"inputs are tokens, and model is 'mlp', which takes numbers"
    ):
        check(configuration(path, inputs="tokens"))
    check(configuration(path, inputs="vector"))


def test_a_partition_that_nobody_named_is_said(tmp_path, capsys):
    path = array_file(tmp_path)
    configured(read_arguments([f"dataset={path}"]))
    assert "no partition is named, so partition=pathological divides" in capsys.readouterr().err
    for chosen in ([f"dataset={path}", "partition=iid"], ["dataset=digits"]):
        configured(read_arguments(chosen))
        assert "no partition is named" not in capsys.readouterr().err


def test_methods_that_nobody_named_are_left_out_if_they_do_not_serve_the_task(tmp_path, capsys):
    path = array_file(tmp_path, y=X[:, 0])
    _, labels = configured(read_arguments([f"dataset={path}"]))
    assert labels == ["fedavg", "fedper", "odpfl-hn", "pfedhn"]
    said = " ".join(capsys.readouterr().err.split())
    assert "left out, since they do not serve task=values: tent, fedtta++" in said
    _, labels = configured(read_arguments([f"dataset={array_file(tmp_path, name='classes')}"]))
    assert "tent" in labels


COLUMNS = {
    "texts of truth": (np.where(Y > 0, "ja", "nein"), {}, "5 numeric .*, 1 of categories"),
    "categories": (WORDS[Y], {}, "1 of categories"),
    "codes with zeros": (np.array(["01067", "04109", "10115"])[Y], {}, "1 of categories"),
    "an empty one": (np.nan, {"missing": "mean"}, "5 numeric columns"),
    "gaps": (np.where(Y > 1, np.nan, X[:, 5]), {"missing": "mean"}, "6 numeric columns"),
    "identifiers with a gap": (
        np.where(np.arange(ROWS) == 5, np.nan, np.arange(ROWS) + 84000.0),
        {"missing": "mean"},
        "5 numeric columns",
    ),
    "texts of identifiers with a gap": (
        [None if row == 5 else f"P{row}" for row in range(ROWS)],
        {"missing": "mean"},
        "5 numeric columns",
    ),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_are_read_by_their_kind(kind, tmp_path):
    cells, changes, words = COLUMNS[kind]
    path = table_file(tmp_path, patient_id=cells, label=Y)
    said = line(path, **changes)
    assert words.split(" .*, ")[-1] in said, said
    assert said.endswith("3 classes")


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (np.nan, "300 cells without a value, the first in row 0 .*missing=mean.*ignore=f"),
        (np.where(np.arange(ROWS) == 3, "inf", "1.5e0"), "holds infinity, in 1 cells, .* row 3 "),
        ([f"{n + 1000:,}" for n in range(ROWS)], "such as '1,000', whose comma .*ignore=f"),
        ([f"{v:.1f} mm" for v in X[:, 5]], r"numbers with a unit .*\(300 cells\).*ignore=f"),
        ([f"{n % 28 + 1} Mar 2020" for n in range(ROWS)], "dates or times such as '1 Mar 2020'"),
        (np.where(Y == 1, np.inf, X[:, 5]), "holds infinity, in .* cells, the first in row"),
        (X[:, 5].astype(float) * 1e300, "holds numbers up to .*larger unit, or leave .*ignore=f"),
        ([f"note {n % 150}" for n in range(ROWS)], "150 different texts .*ignore=f"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_read_are_named(cells, words, tmp_path):
    path = table_file(tmp_path, f=cells, label=Y)
    with pytest.raises(ValueError, match=rf"d\.csv: column f .*{words}"):
        partitions.federation(configuration(path))


FILES = {
    "a mark of UTF-8": {"encoding": "utf-8-sig"},
    "UTF-16 with tabs": {"encoding": "utf-16", "sep": "\t"},
    "Latin-1": {"encoding": "latin-1"},
    "semicolons and decimal commas": {"sep": ";", "decimal": ","},
    "old line ends": {"lineterminator": "\r"},
}


@pytest.mark.parametrize("form", FILES)
def test_files_of_each_form_are_the_same_table(form, tmp_path):
    frame = TABLE.assign(label=Y).rename(columns={"a": 'größe, "in" cm'})
    frame.to_csv(tmp_path / "d.csv", index=False, **FILES[form])
    found = loaded(configuration(tmp_path / "d.csv"))
    assert found.info.inputs.names == ('größe, "in" cm', "b", "c", "d", "e")
    assert np.allclose(found.x, TABLE)


def test_a_line_for_excel_is_no_row(tmp_path):
    text = TABLE.assign(label=Y).to_csv(index=False, sep=";")
    (tmp_path / "d.csv").write_text(f"sep=;\n{text}")
    assert loaded(configuration(tmp_path / "d.csv")).x.shape == (ROWS, 5)


def test_codes_of_classes_keep_their_zeros(tmp_path):
    path = table_file(tmp_path, label=np.array(["001", "002", "010"])[Y])
    assert loaded(configuration(path)).classes == ("001", "002", "010")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b, a,label\n1,2,3,0\n", "two columns are called 'a'; rename one"),
        ("a|b|label\n1|2|0\n", r"the header is one name.*by commas, semicolons .*not by '\|'"),
        ("0.5,1.5,0\n0.1,0.2,1\n", "the first line holds numbers such as '0.5'; add a line"),
        ("5,1,1\n4,2,0\n", "the first line holds numbers, and 1 twice; add a line"),
        ("a,b,label\n", "a header and no rows; add a row for each sample"),
        ("a;b;label\n1,5;1.234;0\n2,5;2.345;1\n", "column b has a point .*; write all numbers"),
        ("a,b,outcome\n1,2,0\n2,3,1\n", "holds no labels .*label=NAME.*columns: a, b, outcome"),
    ],
)
def test_files_that_cannot_be_read_name_what_to_write(text, words, tmp_path):
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"d\.csv.*{words}"):
        partitions.federation(configuration(tmp_path / "d.csv"))


def test_other_types_of_pandas_are_read(tmp_path):
    frame = TABLE.assign(
        f=pd.Categorical(WORDS[Y]),
        whole=pd.array([1, None] * (ROWS // 2), dtype="Int64"),
        truth=pd.array([True, None] * (ROWS // 2), dtype="boolean"),
        when=pd.array([pd.NaT] * ROWS, dtype="datetime64[ns]"),
        label=pd.Categorical(WORDS[Y]),
    )
    frame.to_parquet(tmp_path / "d.parquet")
    said = line(tmp_path / "d.parquet", missing="mean")
    assert said.startswith("300 rows, 6 numeric columns scaled by the training clients' statistics")
    assert said.endswith("1 of truth values, 1 of categories, 3 classes")


def test_wine_is_learnt(tmp_path):
    load_wine(as_frame=True).frame.to_csv(tmp_path / "d.csv", index=False)
    scores, _ = trained(tmp_path / "d.csv", label="target", rounds=5)
    assert scores["novel-accuracy"] >= 0.94


def test_data_under_a_relative_path_are_read_and_spoken_of_once(tmp_path, monkeypatch, caplog):
    """Also where one of the methods has data of its own; jobs may run in another folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        array_file(tmp_path, name=name, y=np.eye(3)[Y])
    request = read_arguments(["dataset=one.npz", "partition=iid"])
    request |= Experiment(methods="fedavg,fedavg dataset=two.npz")
    config, labels = configured(request)
    jobs = make_jobs(config, labels, [0], tmp_path)
    assert [job.config["dataset"] for job in jobs] == [
        str(tmp_path / "one.npz"),
        str(tmp_path / "two.npz"),
    ]
    for job in jobs:
        described(job.config)
    said = [text for text in caplog.messages if "labels are one-hot" in text]
    assert len(said) == 2


def test_texts_of_labels_have_no_blanks_around_them(tmp_path, caplog):
    """Those that differ in case alone are named."""
    blanks = np.where(np.arange(ROWS) % 2, "", " ")
    path = table_file(tmp_path, label=np.char.add(WORDS[Y], blanks))
    assert loaded(configuration(path)).classes == tuple(WORDS)
    path = array_file(tmp_path, y=np.where(np.arange(ROWS) % 2, "yes", "Yes"))
    assert loaded(configuration(path)).classes == ("Yes", "yes")
    assert "labels Yes and yes are several classes, though they differ in case" in caplog.text


def test_a_class_that_no_training_sample_has_is_named(tmp_path, caplog):
    y = np.where(np.arange(ROWS) >= ROWS - 3, 3, Y)
    np.savez(tmp_path / "d.npz", x_train=X[:200], y_train=y[:200], x_test=X[200:], y_test=y[200:])
    assert loaded(configuration(tmp_path / "d.npz")).info.num_classes == 4
    assert "no training sample has the class 3, of 3 samples held out" in caplog.text


def test_whole_decimals_are_quantities_and_said(tmp_path, caplog):
    x = (np.arange(ROWS * 4) % 300).reshape(ROWS, 4).astype(np.float16)
    assert "vectors of 4 columns scaled" in line(array_file(tmp_path, x=x))
    assert "quantities (inputs=vector); inputs=tokens reads token ids" in caplog.text
    assert "4 tokens each" in line(array_file(tmp_path, x=x, name="tokens"), inputs="tokens")


def test_tabs_under_their_own_ending(tmp_path):
    TABLE.assign(label=Y).to_csv(tmp_path / "d.tsv", sep="\t", index=False)
    assert loaded(configuration(tmp_path / "d.tsv")).x.shape == (ROWS, 5)
