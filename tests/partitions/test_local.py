"""Own data by its path: what is read, in which order, under which names."""

import datasets
import numpy as np
import pytest
from PIL import Image

import partitions
from fedapps.settings.config import defaults
from partitions.datasets.description import Column
from partitions.datasets.loading import configured, described
from partitions.datasets.readers.local import read_files
from partitions.datasets.readers.raw import UNLABELED


def picture(path, colour, size=(6, 4), mode="RGB"):
    """An image file of one colour, `size` = (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def test_class_folders_are_read_in_alphabetical_order(tmp_path):
    picture(tmp_path / "tulip" / "b.png", (0, 0, 30))
    picture(tmp_path / "rose" / "deep" / "a.png", (10, 20, 30))
    picture(tmp_path / "rose" / "c.png", 7, mode="L")
    raw = read_files(tmp_path)
    assert raw.classes == ("rose", "tulip")
    assert raw.x.shape == (3, 3, 4, 6)  # n, channels, height, width; grey ones become RGB
    assert raw.y.tolist() == [0, 0, 1] and raw.num_train == 3
    assert sorted(raw.x[:2, :, 0, 0].tolist()) == [[7, 7, 7], [10, 20, 30]]
    assert raw.x[2, :, 3, 5].tolist() == [0, 0, 30]


def test_train_and_test_folders_are_the_split(tmp_path):
    for part, colours in (("train", (1, 2)), ("test", (3, 4))):
        for name, colour in zip(("cat", "dog"), colours, strict=True):
            picture(tmp_path / part / name / "0.png", colour, mode="L")
    raw = read_files(tmp_path)
    assert raw.x[:, 0, 0, 0].tolist() == [1, 2, 3, 4]
    assert (raw.y.tolist(), raw.num_train, raw.x.shape[1]) == ([0, 1, 0, 1], 2, 1)
    picture(tmp_path / "test" / "emu" / "0.png", 9, mode="L")
    with pytest.raises(ValueError, match="different class folders; only one of them has emu;"):
        read_files(tmp_path)


def test_images_of_many_sizes_need_one_size(tmp_path):
    picture(tmp_path / "a" / "0.png", 5, (6, 4), "L")
    picture(tmp_path / "a" / "1.png", 9, (3, 8), "L")
    with pytest.raises(ValueError, match=r"1\.png has 3×8 pixels, the first image 6×4; image-size"):
        read_files(tmp_path)
    assert read_files(tmp_path, 2).x[:, 0].tolist() == [[[5, 5], [5, 5]], [[9, 9], [9, 9]]]


def test_images_without_class_folders_are_unlabeled(tmp_path):
    picture(tmp_path / "0.png", 5, mode="L")
    assert read_files(tmp_path).y.tolist() == [UNLABELED]


def test_other_files_are_named_with_what_is_read(tmp_path):
    (tmp_path / "own.txt").write_text("1,2")
    with pytest.raises(ValueError, match=r"own\.txt is no data.*\.npz.*\.csv.*datasets library"):
        read_files(tmp_path / "own.txt")
    for text, words in (("", "is no CSV file with a header"), ("a,b\n", "a header and no rows")):
        (tmp_path / "own.csv").write_text(text)
        with pytest.raises(ValueError, match=rf"own\.csv .*{words}"):
            read_files(tmp_path / "own.csv")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_tables_numbers_and_texts_are_inputs(tmp_path, ending):
    """Of four columns, `species` labels and `site` is a text: n is 0, s is 1. It may also name the
    clients. Without `label`, no column labels."""
    columns = {"a": [1, 2, 3], "species": ["elk", "bee", "elk"], "b": [0.5, 1.5, -1.0]}
    table = datasets.Dataset.from_dict(columns | {"site": ["n", "s", "n"]})
    file = tmp_path / f"own.{ending}"
    getattr(table, f"to_{ending}")(str(file))
    config = defaults() | {"dataset": str(file), "label": "species", "num-clients": 2}
    info, found = described(config), configured(config)
    assert (info.shape, info.num_classes, info.classes) == ((3,), 2, ("bee", "elk"))
    assert info.inputs.names == ("a", "b", "site")
    assert info.inputs.columns[2] == Column("site", "category", ("n", "s"))
    assert found.x.tolist() == [[1.0, 0.5, 0], [2.0, 1.5, 1], [3.0, -1.0, 0]]
    assert (found.y.tolist(), found.columns["site"].tolist()) == ([1, 0, 1], ["n", "s", "n"])
    bare = read_files(file)
    assert bare.y.tolist() == [UNLABELED] * 3 and bare.columns["species"].tolist()[1] == "bee"
    columns = "has no column 'kind' of labels; label=NAME must be one of a, species, b, site"
    with pytest.raises(ValueError, match=columns):
        configured(config | {"label": "kind"})


def test_data_to_train_on_need_labels(tmp_path):
    np.savez(tmp_path / "bare.npz", x=np.zeros((9, 4), np.float32))
    config = defaults() | {"dataset": str(tmp_path / "bare.npz")}
    with pytest.raises(ValueError, match=r"bare\.npz: holds no labels"):
        partitions.federation(config)


def test_arrays_of_an_npz(tmp_path):
    """(2, 4, 6, 3) has its channels last; texts as labels are classes in alphabetical order."""
    x = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    np.savez(tmp_path / "d.npz", x=x, y=np.array(["no", "maybe"]), writer=np.array([5, 9]))
    raw = read_files(tmp_path / "d.npz")
    assert raw.x.shape == (2, 3, 4, 6) and raw.x[1, 2, 3, 5] == 143
    assert (raw.y.tolist(), raw.classes) == ([1, 0], ("maybe", "no"))
    assert raw.columns["writer"].tolist() == [5, 9]
    parts = {"x_train": np.eye(3), "y_train": [[2], [0], [1]], "x_test": np.ones((1, 3))}
    np.savez(tmp_path / "s.npz", **parts, y_test=[1])
    raw = read_files(tmp_path / "s.npz")
    assert (raw.num_train, raw.y.tolist(), raw.x.dtype) == (3, [2, 0, 1, 1], np.float64)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": [1]}, "must hold x and y"),
        (
            {"x": np.eye(2), "y": [0, 1], "x_train": np.eye(2), "y_train": [0, 1]},
            "holds x, x_train, y, y_train; it must hold either x and y, or x_train, y_train, x_t",
        ),
        ({"x": np.eye(2), "y_train": [0, 1]}, "holds x, y_train; it must hold either"),
        ({"x": np.array([[1.0], [np.nan]]), "y": [0, 1]}, "NaN"),
        ({"x": np.eye(3), "y": [0, 1]}, "3 inputs, but 2 labels"),
        ({"x": [["a"]], "y": [0]}, "numbers"),
    ],
)
def test_what_an_npz_must_hold(tmp_path, arrays, words):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(ValueError, match=words):
        read_files(tmp_path / "d.npz")


def test_damaged_files_are_named(tmp_path):
    for content in (b"PK no zip", b"no zip"):
        (tmp_path / "d.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"d\.npz is no whole \.npz((?!pickle).)*$"):
            read_files(tmp_path / "d.npz")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"0\.png is no whole image"):
        read_files(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no images"):
        read_files(tmp_path / "empty")


def test_bytes_in_a_column_are_pixels(tmp_path):
    """As in an .npz, whole numbers from 0 to 255 are bytes of any type."""
    pixels = np.arange(16).reshape(4, 2, 2) * 17
    for kind in ("uint8", "int32", "float64"):
        for name, feature in (
            ("array", datasets.Array2D((2, 2), kind)),
            ("lists", datasets.Sequence(datasets.Sequence(datasets.Value(kind)))),
        ):
            features = datasets.Features({"x": feature, "label": datasets.Value("int64")})
            rows = {"x": pixels.tolist(), "label": [0, 1, 0, 1]}
            folder = tmp_path / f"{kind}-{name}"
            datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder))
            raw = read_files(folder, inputs="image")
            assert raw.x.dtype == np.uint8, name
            assert raw.x.reshape(-1).tolist() == pixels.reshape(-1).tolist()


def test_a_datasets_folder_and_a_parquet_file(tmp_path):
    rows = {
        "image": [Image.new("L", (6, 4), 8 * i) for i in range(3)],
        "label": [2, 0, 1],
        "site": ["north", "south", "north"],
    }
    names = datasets.ClassLabel(names=["a", "b", "c"])
    table = datasets.Dataset.from_dict(rows).cast_column("label", names)
    split = {"train": table, "test": table.select([1])}
    datasets.DatasetDict(split).save_to_disk(str(tmp_path / "saved"))
    raw = read_files(tmp_path / "saved")
    assert raw.x[:, 0, 3, 5].tolist() == [0, 8, 16, 8]
    assert (raw.y.tolist(), raw.num_train, raw.classes) == ([2, 0, 1, 0], 3, ("a", "b", "c"))
    assert raw.columns["site"].tolist() == ["north", "south", "north", "south"]
    numbers = {"features": [[1.0, 2.0], [3.0, 4.5]], "label": ["x", "w"]}
    datasets.Dataset.from_dict(numbers).to_parquet(str(tmp_path / "n.parquet"))
    raw = read_files(tmp_path / "n.parquet")
    assert (raw.x.tolist(), raw.y.tolist()) == ([[1.0, 2.0], [3.0, 4.5]], [1, 0])
