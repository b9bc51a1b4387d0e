"""Labels of files in the forms that people bring: read where they have one reading, else refused by
a sentence."""

from decimal import Decimal

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image

import partitions
from fedapps.settings.config import defaults
from partitions.datasets.labels import of_node, one_per_sample
from partitions.datasets.loading import _own, configured, described
from partitions.datasets.readers.local import read_files

pytestmark = pytest.mark.usefixtures("own_cache")
X = np.arange(12.0, dtype=np.float32).reshape(4, 3)


def saved(path, y, **arrays):
    np.savez(path / "d.npz", x=X, y=np.asarray(y), **arrays)
    return defaults() | {"dataset": str(path / "d.npz")}


@pytest.mark.parametrize(
    ("y", "read", "classes"),
    [
        ([[2], [0], [1], [0]], [2, 0, 1, 0], ()),
        ([2.0, 0.0, 1.0, 0.0], [2, 0, 1, 0], ()),
        ([[2.0], [0.0], [1.0], [0.0]], [2, 0, 1, 0], ()),
        (np.float16([2, 0, 1, 0]), [2, 0, 1, 0], ()),
        ([True, False, True, True], [1, 0, 1, 1], ("False", "True")),
        (["b", "a", "c", "a"], [1, 0, 2, 0], ("a", "b", "c")),
        ([[b"b"], [b"a"], [b"c"], [b"a"]], [1, 0, 2, 0], ("a", "b", "c")),
        ([3, 1, 2, 1], [2, 0, 1, 0], ("1", "2", "3")),
        ([3.0, 1.0, 2.0, 1.0], [2, 0, 1, 0], ("1", "2", "3")),
        ([-1, 1, 1, -1], [0, 1, 1, 0], ("-1", "1")),
        ([[0, 0, 1], [1, 0, 0], [0, 1, 0], [1, 0, 0]], [2, 0, 1, 0], ()),
    ],
)
def test_a_form_with_one_reading_is_read(tmp_path, y, read, classes):
    found = configured(saved(tmp_path, y))
    assert (found.y.tolist(), found.classes) == (read, classes)
    assert found.info.num_classes == (len(classes) or 3)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        ([1.0, np.nan, 0.0, 1.0], r"d\.npz: row 1 has no label \(nan\); fill it in, or leave"),
        (["a", "b", "?", "a"], r"d\.npz: row 2 has no label \('\?'\); fill it in"),
        (["a", "", "b", "a"], r"d\.npz: row 1 has no label \(''\)"),
        ([1.0, np.inf, 0.0, 1.0], "row 1 has the label inf, one of 1 that are no finite"),
        (
            [[1, 0, 2], [1, 0, 0], [0, 1, 0], [1, 0, 0]],
            "3 columns of whole numbers; set task=values",
        ),
        (
            [[0.9, 0.1], [0.1, 0.9], [0.5, 0.5], [1, 0]],
            r"2 decimals that add up to 1, such as \[0\.9, 0\.1\]; set task=values .*y\.argmax",
        ),
        (np.zeros((4, 5, 5), int), r"labels have the shape \(4, 5, 5\), as masks have"),
        (np.zeros((4, 0), int), "must have a row for each sample"),
        ([1j, 0, 0, 1], "labels are complex128; a label is one class"),
        ([-1, 0, 1, 2], "row 0 has the label -1; number the classes from 0 on, give"),
    ],
)
def test_other_forms_are_refused(tmp_path, y, words):
    with pytest.raises(ValueError, match=words):
        configured(saved(tmp_path, y))


@pytest.mark.parametrize(
    ("y", "declared", "task", "stored"),
    [
        ([0.5, 1.0, 40.25, 3.0], "auto", "values", [[0.5], [1.0], [40.25], [3.0]]),
        ([5, 1, 40, 3], "values", "values", [[5.0], [1.0], [40.0], [3.0]]),
        ([[5, 1], [40, 3], [1, 1], [0, 9]], "values", "values", [[5, 1], [40, 3], [1, 1], [0, 9]]),
        ([[1, 0], [1, 1], [0, 0], [0, 1]], "auto", "labels", [[1, 0], [1, 1], [0, 0], [0, 1]]),
        ([[1, 0], [1, 0], [0, 1], [0, 1]], "labels", "labels", [[1, 0], [1, 0], [0, 1], [0, 1]]),
        ([[0.5, 0.5], [0.25, 0.75]] * 2, "values", "values", [[0.5, 0.5], [0.25, 0.75]] * 2),
        ([[0.5, 0.25], [0.25, 0.5]] * 2, "auto", "values", [[0.5, 0.25], [0.25, 0.5]] * 2),
        ([-1, 1, 1, -1], "binary", "binary", [0, 1, 1, 0]),
        (["b", "a", "b", "a"], "binary", "binary", [1, 0, 1, 0]),
    ],
)
def test_labels_of_other_tasks(tmp_path, y, declared, task, stored):
    """Decimals and rows of several truth values can be one task alone; others are declared."""
    dataset = configured(saved(tmp_path, y) | {"task": declared})
    assert dataset.info.task == task
    assert dataset.y.tolist() == stored
    assert dataset.info.num_outputs == (1 if task == "binary" else len(np.atleast_2d(stored)[0]))


@pytest.mark.parametrize(
    ("y", "declared", "words"),
    [
        ([[1, 0], [2, 1], [0, 0], [0, 1]], "labels", "row 1, column 0 of the labels is 2"),
        ([0, 1, 0, 1], "labels", "needs a column of 0 and 1 for each label"),
        ([1.0, 2.0, np.nan, 0.5], "values", "row 2 has the label nan, one of 1 that are no finite"),
        (["a", "b", "a", "b"], "values", "task=values needs numbers"),
        ([0, 1, 2, 1], "binary", "task=binary needs two classes; set task=classes"),
        ([0.5, 1.0, 40.25, 3.0], "classes", r"decimals such as 0\.5 \(row 0\).*; set task=values"),
    ],
)
def test_labels_that_contradict_the_declared_task(tmp_path, y, declared, words):
    with pytest.raises(ValueError, match=words):
        configured(saved(tmp_path, y) | {"task": declared})


def test_a_gap_in_a_tables_labels_is_named_by_its_row(tmp_path):
    """pandas makes the numbers beside a gap decimals, the texts objects."""
    for cells in ("0,,1", "a,,b", "a,NA,b"):
        rows = [f"{i},{cell}" for i, cell in enumerate(cells.split(","))]
        (tmp_path / "d.csv").write_text("\n".join(["size,kind", *rows]))
        with pytest.raises(ValueError, match=r"d\.csv, column kind: row 1 has no label"):
            read_files(tmp_path / "d.csv", label="kind")


def test_what_is_said_of_data_is_said_in_each_process(tmp_path, caplog):
    """Also where the cache holds the data: `_own` keeps them for one process."""
    config = saved(tmp_path, [[0, 1], [1, 0], [0, 1], [1, 0]], size=np.ones(9))
    for _ in range(2):
        described(config)
        one_hot, _, unused = (message.rpartition("d.npz: ")[2] for message in caplog.messages)
        assert one_hot == "labels are one-hot: 2 classes"
        assert unused == "arrays are left out (they hold no single value for each sample): size"
        caplog.clear()
        _own.cache_clear()


def test_label_names_the_array_of_labels(tmp_path):
    config = saved(tmp_path, [0, 1, 0, 1], kind=np.array(["b", "a", "b", "a"])) | {"label": "kind"}
    assert configured(config).classes == ("a", "b")
    assert configured(config).columns["y"].tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"d\.npz holds no labels sort; its arrays: kind, x, y"):
        configured(config | {"label": "sort"})
    with pytest.raises(ValueError, match=r"d\.npz: 4 inputs, but 3 labels"):
        np.savez(tmp_path / "d.npz", x=X, y=[[0], [1], [0]])
        read_files(tmp_path / "d.npz")


def test_splits_with_labels_have_them_all(tmp_path):
    whole = {"x_train": X, "y_train": [0, 1, 0, 1], "x_test": X, "y_test": [0, 1, 0, 1]}
    for missing, words in (
        ("y_test", "holds no labels y_test; its arrays: x_test, x_train, y_train"),
        ("x_train", "holds x_test without x_train"),
    ):
        np.savez(tmp_path / "d.npz", **{n: a for n, a in whole.items() if n != missing})
        with pytest.raises(ValueError, match=words):
            read_files(tmp_path / "d.npz")
    np.savez(tmp_path / "d.npz", **whole | {"y_test": list("abab")})
    with pytest.raises(ValueError, match="training and test labels differ in type"):
        read_files(tmp_path / "d.npz")


def test_a_folder_of_images_takes_no_column_of_labels(tmp_path):
    (tmp_path / "cat").mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "cat" / "0.png")
    with pytest.raises(ValueError, match=r"label is 'kind', but .* whose labels are names of"):
        read_files(tmp_path, label="kind")


def test_images_that_are_left_out_are_said(tmp_path):
    """Two files that are no images in class folders, a folder beside train and test, a second
    frame, and transparency. Hidden files and folders are a program's."""
    for split in ("train", "test", "extra"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(tmp_path / split / "cat" / "0.png")
    train = tmp_path / "train"
    Image.new("RGB", (2, 2)).save(train / "stray.png")
    (train / "cat" / "1.heic").write_text("")
    (train / "cat" / ".hidden").write_text("")
    (train / ".cache").mkdir()
    first, second = (Image.new("RGB", (2, 2), grey) for grey in ("red", "blue"))
    first.save(train / "cat" / "2.tiff", save_all=True, append_images=[second])
    Image.new("RGBA", (2, 2)).save(train / "cat" / "3.png")
    raw = read_files(tmp_path)
    assert raw.samples == ("cat/0.png", "cat/2.tiff", "cat/3.png", "cat/0.png")
    assert raw.classes == ("cat",)
    frames, transparent, files, folders = raw.notes
    assert frames.endswith("2.tiff: frames but the first left out, here and in 0 more images")
    assert transparent.endswith("3.png: transparency left out, here and in 0 more images")
    assert "2 files are left out, such as train/cat/1.heic; images (.jpg" in files
    assert folders.endswith("folders beside train and test are left out: extra")


def image_dataset(folder, **columns):
    """Four images and further columns as a folder of the datasets library."""
    images = [Image.new("L", (2, 2), 60 * row) for row in range(4)]
    table = datasets.Dataset.from_dict({"image": images} | columns)
    table.save_to_disk(str(folder / "d"))
    return defaults() | {"dataset": str(folder / "d")}


@pytest.mark.parametrize("cells", [["a", None, "b", "a"], [7, None, 8, 7]])
def test_a_column_beside_images_may_have_gaps(tmp_path, cells):
    """It may be a caption. As the clients' column its gap is named by its row."""
    config = image_dataset(tmp_path, label=[0, 1, 0, 1], who=cells)
    owners = ["" if cell is None else str(cell) for cell in cells]
    assert configured(config).columns["who"].tolist() == owners
    owned = {"partition": "natural", "partition.column": "who", "num-clients": 2}
    with pytest.raises(ValueError, match=r"column who, .* has 1 empty cells, the first in row 1"):
        partitions.federation(config | owned)


@pytest.mark.parametrize(
    ("labels", "task", "stored"),
    [
        ([[1, 0], [1, 1], [0, 0], [0, 1]], "labels", [[1, 0], [1, 1], [0, 0], [0, 1]]),
        ([[1, 0], [1, 0], [0, 1], [0, 1]], "classes", [0, 0, 1, 1]),
    ],
)
def test_lists_of_labels_beside_images(tmp_path, labels, task, stored):
    """As in an .npz: several labels at once, or one-hot rows."""
    dataset = configured(image_dataset(tmp_path, label=labels))
    assert dataset.info.task == task
    assert dataset.y.tolist() == stored


def test_lists_of_several_lengths_are_named(tmp_path):
    table = datasets.Dataset.from_dict({"x": [[1.0], [1.0, 2.0], [3.0]], "label": [0, 1, 0]})
    table.save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ValueError, match="inputs are lists of 1 to 2 values; pad them to one len"):
        configured(defaults() | {"dataset": str(tmp_path / "d")})


def test_texts_that_are_the_only_column_are_said_to_be_left_out(tmp_path):
    rows = "".join(f"review {row},{row % 2}\n" for row in range(20))
    (tmp_path / "d.csv").write_text("text,label\n" + rows)
    config = defaults() | {"dataset": str(tmp_path / "d.csv"), "partition": "iid"}
    config |= {"num-clients": 2}
    words = r"text is left out, because its texts differ in every row.*no other column is left"
    with pytest.raises(ValueError, match=words):
        partitions.federation(config)


def test_columns_with_several_readings_are_refused(tmp_path):
    image = [Image.new("L", (2, 2))] * 2
    for columns, words in (
        ({"image": image, "x": [[1.0], [2.0]], "label": [0, 1]}, "columns image and x is needed"),
        ({"a": [1, 2], "label": [0, 1], "class": [1, 0]}, "label and class may both hold the lab"),
    ):
        datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "d"))
        with pytest.raises(ValueError, match=words):
            read_files(tmp_path / "d")
    assert read_files(tmp_path / "d", label="class").y.tolist() == [1, 0]


def test_what_a_table_leaves_out_is_said(tmp_path):
    """A column of numbers called x is one of the table's numbers, and truth values are numbers."""
    columns = {"x": [1, 2], "old": [True, False], "site": ["n", "s"], "label": [0, 1]}
    table = datasets.Dataset.from_dict(columns | {"trace": [[1], [2]]})
    datasets.DatasetDict({"train": table, "test": table, "unsupervised": table}).save_to_disk(
        str(tmp_path / "d")
    )
    raw = read_files(tmp_path / "d")
    assert raw.x.tolist() == [[1, 1, 0], [2, 0, 1]] * 2
    assert [column.kind for column in raw.inputs.columns] == ["number", "truth value", "category"]
    assert "columns are left out, whose cells are no single values: trace (List)" in str(raw.notes)
    assert "of the splits train, test is read, not unsupervised" in str(raw.notes)


def test_cells_and_columns_without_a_name_or_a_number_are_named(tmp_path):
    for text, words in (
        (",a,label\n7,5,0\n9,6,1\n", r"column 0 \(from 0\) has no name; name it, or leave it out"),
        ("a,label\n0,5,0\n1,6,1\n", r"rows have more cells than the header"),
    ):
        (tmp_path / "d.csv").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_files(tmp_path / "d.csv")


def test_names_of_images_survive_labels_that_are_texts(tmp_path):
    table = datasets.Dataset.from_dict({"image": [Image.new("L", (2, 2))], "label": ["elk"]})
    table.save_to_disk(str(tmp_path / "d"))
    assert read_files(tmp_path / "d").samples == ("0",)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.eye(3), r"mine: labels are one-hot rows of 3 classes; give their numbers, y\.argmax"),
        (["a", "b"], "mine: labels are texts such as 'a'; number the classes 0, 1, …, alike"),
        ([0, -1], "mine: row 1 has the label -1, which is no class; number the classes from 0"),
        ([-1, -1], "row 0 has the label -1, .* give a client without labels its inputs alone"),
        (3, "labels are a single value"),
        ([None, 1], r"row 0 has no label \(None\)"),
        (["a", 1, None], "row 2 has no label"),
        (np.array(["a", 1], object), "row 0 has the label 'a', row 1 1; give all labels as texts"),
        (np.array([{}, 1], object), "labels are dict; a label is one class"),
        (np.array([2**63], np.uint64), "labels go up to 9223372036854775808"),
    ],
)
def test_a_node_alone_takes_numbers_of_classes_only(y, words):
    with pytest.raises(ValueError, match=words):
        of_node(y, "mine")


def test_objects_of_one_type_are_that_type():
    assert one_per_sample(np.array(["a", "b"], object), "mine").tolist() == ["a", "b"]
    assert of_node(np.array([1, 2.0], object), "mine").tolist() == [1, 2]
    assert of_node([True, False], "mine").tolist() == [1, 0]


def test_many_whole_numbers_may_be_values(tmp_path):
    """60 numbers in 120 rows are ambiguous; a declared task is not, and 50 numbers are classes."""
    x = np.zeros((120, 2)) + np.arange(120)[:, None]
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(120) % 60)
    with pytest.raises(
        ValueError, match=r"60 different whole numbers in 120 samples; set task=val"
    ):
        read_files(tmp_path / "d.npz")
    assert read_files(tmp_path / "d.npz", task="values").y.shape == (120, 1)
    assert read_files(tmp_path / "d.npz", task="classes").y.max() == 59
    np.savez(tmp_path / "e.npz", x=x, y=np.arange(120) % 50)
    assert read_files(tmp_path / "e.npz").y.max() == 49


@pytest.mark.parametrize(
    ("y", "names", "count"),
    [
        ([2, 4, 4, 2], "3", "(empty: 1 of 3 classes)"),
        ([0, 5, 10, 5], "1, 2, 3, 4, 6, 7, 8, 9", "(empty: 8 of 11 classes)"),
    ],
)
def test_numbers_between_the_classes_are_named(tmp_path, caplog, y, names, count):
    """Labels 2 and 4 are often two classes, and have three outputs."""
    configured(saved(tmp_path, y))
    assert f"no sample has the class {names} {count}" in caplog.text


@pytest.mark.parametrize("task", ["auto", "values"])
def test_amounts_of_a_database_are_values(tmp_path, task):
    """Parquet's decimals are Python's. The sentence said that a label is a class."""
    amounts = [Decimal("0.5"), Decimal("19.99"), Decimal("7.25"), Decimal("3.00")]
    pandas.DataFrame({"size": X[:, 0], "cost": amounts}).to_parquet(tmp_path / "d.parquet")
    raw = read_files(tmp_path / "d.parquet", label="cost", task=task)
    assert (raw.task, raw.y.tolist()) == ("values", [[0.5], [19.99], [7.25], [3.0]])


def test_whole_amounts_are_classes(tmp_path):
    kinds = [Decimal(kind) for kind in (1, 0, 2, 1)]
    pandas.DataFrame({"size": X[:, 0], "kind": kinds}).to_parquet(tmp_path / "d.parquet")
    assert read_files(tmp_path / "d.parquet", label="kind").y.tolist() == [1, 0, 2, 1]


def test_numbers_far_apart_are_refused_and_not_listed(tmp_path):
    with pytest.raises(ValueError, match="labels go up to 1000000000000, but only 2 different"):
        configured(saved(tmp_path, [0, 10**12, 0, 10**12]))


@pytest.mark.parametrize("y", [[0, 1, 2, 1], [1, 2, 2, 1], ["2", "4", "4", "2"], [-1, 1, 1, -1]])
def test_without_such_numbers_nothing_is_said(tmp_path, caplog, y):
    configured(saved(tmp_path, y))
    assert "no sample has the class" not in caplog.text


def encoded(names, inputs):
    """Four samples of a split, whose classes are numbered by the names that it has itself."""
    labels = [names[row % len(names)] for row in range(4)]
    content = {"label": labels, **inputs}
    return datasets.Dataset.from_dict(content).class_encode_column("label")


@pytest.mark.parametrize("form", ["arrow", "parquet"])
@pytest.mark.parametrize("inputs", [{"size": [1.0, 2.0, 3.0, 4.0]}, {"x": X.tolist()}], ids=str)
def test_classes_that_splits_number_otherwise_are_matched_by_name(tmp_path, form, inputs):
    """The test split has no cat, so its dog is 0: it counted as a cat, without a word."""
    splits = {
        "train": encoded(["cat", "dog", "horse"], inputs),
        "test": encoded(["horse", "dog"], inputs),
    }
    assert splits["test"]["label"][:2] == [1, 0]
    if form == "arrow":
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    else:
        (tmp_path / "saved").mkdir()
        for name, split in splits.items():
            split.to_parquet(tmp_path / "saved" / f"{name}.parquet")
    raw = read_files(tmp_path / "saved")
    names = [raw.classes[label] for label in raw.y]
    assert names == ["cat", "dog", "horse", "cat", "horse", "dog", "horse", "dog"]
    assert any("splits number their classes differently" in note for note in raw.notes)


def test_classes_that_splits_number_alike_stay_as_they_are(tmp_path):
    inputs = {"size": [1.0, 2.0, 3.0, 4.0]}
    split = encoded(["dog", "cat"], inputs)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    raw = read_files(tmp_path / "saved")
    assert (raw.classes, raw.y.tolist()) == (("cat", "dog"), [1, 0, 1, 0] * 2)
    assert not raw.notes


def test_files_of_one_split_have_the_same_classes(tmp_path):
    """The classes of the second file were those of the first, or the other way round."""
    inputs = {"size": [1.0, 2.0, 3.0, 4.0]}
    for number, names in enumerate((["cat", "dog"], ["dog", "horse"])):
        encoded(names, inputs).to_parquet(tmp_path / f"train-0000{number}-of-00002.parquet")
    sentence = "column label has the classes cat, dog in .*00000.*, and dog, horse in .*00001"
    with pytest.raises(ValueError, match=sentence):
        read_files(tmp_path)
