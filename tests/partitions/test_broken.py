"""Broken images and rows with empty cells: refused, or left out up to an allowed share."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import partitions
from fedapps.settings.config import defaults
from partitions.datasets.readers.broken import left_out
from partitions.datasets.readers.local import read_files

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_share_decides():
    """2 of 8 are a quarter: allowed by 0.25, and not by 0.24."""
    names = ["a is torn", "b is torn"]
    assert left_out([], 8, 0.0, "images") == []
    assert left_out(names, 8, 0.25, "images") == [
        "a is torn; b is torn: 2 of 8 images are left out (skip-broken=0.25)"
    ]
    with pytest.raises(ValueError, match=r"above skip-broken=0.24; .* set skip-broken=0.25, which"):
        left_out(names, 8, 0.24, "images")
    with pytest.raises(ValueError, match=r"2 of 2 images cannot be used; repair .* away$"):
        left_out(names, 2, 0.0, "images")
    many = [f"{number} is torn" for number in range(13)]
    (note,) = left_out(many, 100, 0.2, "rows")
    assert "9 is torn; and 3 more: 13 of 100 rows" in note and "10 is torn" not in note


def photos(folder, broken=("a/1.png", "b/2.png")):
    """Four files in each of two folders; some are no images."""
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (2, 2), 10 * number).save(folder / name / f"{number}.png")
    for name in broken:
        (folder / name).write_bytes(b"no image")


def test_broken_images_are_left_out_with_their_labels(tmp_path):
    photos(tmp_path)
    with pytest.raises(
        ValueError, match=r"a/1\.png is no whole .*b/2\.png is no whole .*2 of 8 images cannot"
    ):
        read_files(tmp_path)
    raw = read_files(tmp_path, skip=0.3)
    assert raw.samples == ("a/0.png", "a/2.png", "a/3.png", "b/0.png", "b/1.png", "b/3.png")
    assert raw.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert raw.x[:, 0, 0, 0].tolist() == [0, 20, 30, 0, 10, 30]
    assert "2 of 8 images are left out" in raw.notes[0]


def test_broken_pictures_of_a_table_are_left_out(tmp_path):
    content = []
    for number in range(4):
        Image.new("L", (2, 2), number).save(tmp_path / "p.png")
        content.append({"bytes": (tmp_path / "p.png").read_bytes(), "path": None})
    content[1]["bytes"] = b"no image"
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": content, "label": [0, 1, 1, 0]}
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "d.parquet")
    raw = read_files(tmp_path / "d.parquet", skip=0.25)
    assert (raw.y.tolist(), raw.samples) == ([0, 1, 0], ("0", "2", "3"))
    assert raw.x[:, 0, 0, 0].tolist() == [0, 2, 3]


def test_rows_with_empty_cells_are_left_out(tmp_path):
    """Row 3 lacks its label, row 5 an input, row 7 its owner; a gap in an ignored column counts
    for nothing."""
    frame = pd.DataFrame({"a": np.arange(40.0) ** 2, "b": np.arange(40) % 3 + 0.5})
    frame["owner"] = ["x", "y"] * 20
    frame["label"] = ["p", "q", "q", "p"] * 10
    frame["unused"] = np.where(frame.index == 9, np.nan, frame["a"])
    frame.loc[3, "label"] = None
    frame.loc[5, "b"] = np.nan
    frame.loc[7, "owner"] = None
    frame.to_csv(tmp_path / "d.csv", index=False)
    config = defaults() | {
        "dataset": str(tmp_path / "d.csv"),
        "label": "label",
        "ignore": "unused",
        "partition": "natural",
        "partition.column": "owner",
        "num-clients": 2,
    }
    with pytest.raises(ValueError, match=r"row 3"):
        partitions.federation(config)
    found = partitions.federation(config | {"skip-broken": 0.06})
    values = sorted(found.dataset.x[:, 0].sqrt().tolist())
    assert values == [number for number in range(40) if number not in (3, 5, 7)]
    assert found.dataset.num_train == 37
    assert {found.share(client).attributes["owner"] for client in (0, 1)} == {"x", "y"}
    with pytest.raises(ValueError, match=r"2 of 39 rows cannot be used, above skip-broken=0.03"):
        partitions.federation(config | {"skip-broken": 0.03})


def gaps(folder, **arrays):
    """Forty rows of two numbers: row 2 has NaN, row 4 infinity, row 5 no label, row 7 no owner."""
    x = np.arange(80.0).reshape(40, 2)
    x[2, 1] = np.nan
    x[4, 0] = np.inf
    y = np.arange(40) // 2 % 2 + 0.0
    y[5] = np.nan
    owner = np.array(["u", "v"] * 20)
    owner[7] = ""
    np.savez(folder / "d.npz", **{"x": x, "y": y, "owner": owner} | arrays)
    return folder / "d.npz"


def test_rows_of_arrays_are_left_out(tmp_path):
    """3 of 40 rows, and then 1 of 37: both are below 0.08, the first ones are above 0.07."""
    config = defaults() | {
        "dataset": str(gaps(tmp_path)),
        "standardize": "none",
        "partition": "natural",
        "partition.column": "owner",
        "num-clients": 2,
        "train-fraction": 1.0,
    }
    found = partitions.federation(config | {"skip-broken": 0.08})
    kept = [row for row in range(40) if row not in (2, 4, 5, 7)]
    assert found.dataset.x[:, 0].tolist() == [2.0 * row for row in kept]
    assert found.dataset.y.tolist() == [row // 2 % 2 for row in kept]
    assert {found.share(client).attributes["owner"] for client in (0, 1)} == {"u", "v"}
    sentence = (
        r"row 2 holds NaN or infinity; .*row 4 holds NaN or infinity; .*row 5 has no label: "
        r"3 of 40 rows cannot be used, above skip-broken=0.07"
    )
    with pytest.raises(ValueError, match=sentence):
        partitions.federation(config | {"skip-broken": 0.07})
    with pytest.raises(ValueError, match="row 5 has no label"):
        partitions.federation(config)


def test_each_split_of_arrays_has_its_share(tmp_path):
    x = np.arange(20.0).reshape(10, 2)
    hollow = np.where(x == 6, np.nan, x)
    y = np.array(["p", "q"] * 5)
    y_test = np.array(["q", "n/a", *y[2:]])
    np.savez(tmp_path / "d.npz", x_train=hollow, y_train=y, x_test=x + 100, y_test=y_test)
    raw = read_files(tmp_path / "d.npz", skip=0.1)
    assert raw.num_train == 9
    assert raw.x[:, 0].tolist() == [0, 2, 4, 8, 10, 12, 14, 16, 18, 100, *range(104, 120, 2)]
    assert [raw.classes[label] for label in raw.y[8:11]] == ["q", "q", "p"]
    assert any("x_test, row 1 has no label: 1 of 10 rows are left out" in n for n in raw.notes)


def test_a_later_clients_rows_keep_their_numbers(tmp_path):
    """A later client needs no labels: only rows 2 and 4 cannot be used."""
    raw = read_files(gaps(tmp_path, y=np.zeros(40)), later=True, skip=0.05)
    assert raw.rows == tuple(row for row in range(40) if row not in (2, 4))
    assert len(raw.x) == len(raw.y) == 38
