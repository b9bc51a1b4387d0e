"""A setting that a user's own data do not read is refused, as one that no run reads is."""

import numpy as np
import pandas
import pytest
from PIL import Image

from fedapps.planning import configured
from fedapps.settings.experiments import Experiment


@pytest.fixture
def data(tmp_path):
    """The same two columns as an array and as a table, images in a file, and in folders."""
    x = np.arange(40.0).reshape(20, 2)
    y = np.arange(20) % 2
    np.savez(tmp_path / "array.npz", x=x, y=y)
    np.savez(tmp_path / "images.npz", x=np.arange(1280, dtype=np.uint8).reshape(20, 1, 8, 8), y=y)
    pandas.DataFrame({"dose": x[:, 0], "age": x[:, 1], "label": y}).to_csv(tmp_path / "table.csv")
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("L", (8, 8), len(name)).save(tmp_path / "photos" / name / "0.png")
        Image.new("L", (8, 8), 9).save(tmp_path / "photos" / name / "1.png")
    return tmp_path


def check(folder, dataset, from_file=(), **settings):
    settings = {"dataset": str(folder / dataset), "partition": "iid", "num-clients": 2} | settings
    configured(Experiment(settings, methods="fedavg", from_file=frozenset(from_file)))


@pytest.mark.parametrize(
    ("dataset", "key", "value", "words"),
    [
        ("array.npz", "ignore", "age", r"array.npz \(vector\); it is read with tables"),
        ("array.npz", "columns", "age", r"array.npz \(vector\)"),
        ("array.npz", "missing", "mean", r"array.npz \(vector\)"),
        ("photos", "missing", "mean", r"photos \(image\)"),
        ("table.csv", "image-size", 4, r"table.csv \(table\); it is read with files of images"),
        ("images.npz", "image-size", 4, r"images.npz \(image\)"),
        ("table.csv", "inputs", "image", r"table.csv \(table\); it is read with arrays"),
        ("photos", "inputs", "signal", r"photos \(image\)"),
    ],
)
def test_what_the_data_do_not_read_is_refused(data, capsys, dataset, key, value, words):
    with pytest.raises(ValueError, match=f"{key}={value} changes nothing here, .*{words}"):
        check(data, dataset, **{key: value})
    check(data, dataset, from_file=[key], **{key: value})
    said = " ".join(capsys.readouterr().err.split())
    assert f"{key}={value} changes nothing where the dataset is" in said


@pytest.mark.parametrize(
    ("dataset", "key", "value"),
    [
        ("table.csv", "ignore", "age"),
        ("table.csv", "missing", "mean"),
        ("photos", "image-size", 4),
        ("images.npz", "inputs", "image"),
        ("array.npz", "inputs", "vector"),
        ("array.npz", "missing", "refuse"),  # as by default
    ],
)
def test_what_the_data_read_is_taken(data, dataset, key, value):
    check(data, dataset, **{key: value})
