"""A user's own data with splits of their own: each client keeps them, whatever the rule."""

import datasets
import numpy as np
import pandas as pd
import pytest
from PIL import Image

import partitions
from fedapps.settings.config import defaults
from partitions.datasets.readers.local import read_files

pytestmark = pytest.mark.usefixtures("own_cache")
SIZES = {"train": 40, "validation": 12, "test": 8}
FIRST = {"train": 0, "validation": 100, "test": 200}  # the input of each split's first row


def tables():
    """A table for each split, whose input says the row and the split."""
    for name, size in SIZES.items():
        rows = np.arange(size)
        columns = {"a": rows + FIRST[name] + 0.5, "user": np.array(["x", "y"])[rows % 2]}
        yield name, pd.DataFrame(columns | {"label": rows // 2 % 2})


def parts_of(path, **changes):
    """The inputs of each part, of all clients together, in order."""
    config = defaults() | {"dataset": str(path), "standardize": "none", "num-clients": 2}
    config |= {"train-fraction": 1.0, "ignore": "user"} | changes
    federation = partitions.federation(config)
    found = {}
    for part in SIZES:
        values = []
        for client in range(2):
            samples = getattr(federation.share(client), part)
            if samples is not None:
                values += samples[:][0][:, 0].tolist()
        found[part] = sorted(values)
    return found


def expected(*names):
    return {name: [FIRST[name] + row + 0.5 for row in range(SIZES[name])] for name in names}


@pytest.mark.parametrize("form", ["disk", "parquet"])
@pytest.mark.parametrize(
    "rule", [{"partition": "iid"}, {"partition": "natural", "partition.column": "user"}]
)
def test_each_client_keeps_the_splits(tmp_path, form, rule):
    """Of the training rows none becomes validation; the users are those of all splits."""
    if form == "disk":
        splits = {name: datasets.Dataset.from_pandas(frame) for name, frame in tables()}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "d")
    else:
        (tmp_path / "d" / "data").mkdir(parents=True)
        for name, frame in tables():
            frame.to_parquet(tmp_path / "d" / "data" / f"{name}-00000-of-00001.parquet")
    assert parts_of(tmp_path / "d", **rule) == expected("train", "validation", "test")


def test_a_validation_split_without_a_test_split(tmp_path):
    (tmp_path / "d").mkdir()
    for name, frame in tables():
        if name != "test":
            frame.to_parquet(tmp_path / "d" / f"{name}.parquet")
    raw = read_files(tmp_path / "d")
    assert (raw.num_train, raw.num_validation, len(raw.y)) == (40, 12, 52)
    found = parts_of(tmp_path / "d", partition="iid")
    assert found == expected("train", "validation") | {"test": []}


def test_a_test_split_alone_leaves_validation_to_the_training_rows(tmp_path):
    """0.15 of 40 rows are 6."""
    (tmp_path / "d").mkdir()
    for name, frame in tables():
        if name != "validation":
            frame.to_parquet(tmp_path / "d" / f"{name}.parquet")
    found = parts_of(tmp_path / "d", partition="iid")
    assert found["test"] == expected("test")["test"]
    assert len(found["validation"]) == 6
    assert sorted(found["train"] + found["validation"]) == expected("train")["train"]


def test_folders_of_images(tmp_path):
    for split, shade in (("train", 10), ("val", 20), ("test", 30)):
        for name in ("p", "q"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(2):
                picture = Image.new("L", (2, 2), shade + number)
                picture.save(tmp_path / split / name / f"{number}.png")
    raw = read_files(tmp_path)
    assert (raw.num_train, raw.num_validation) == (4, 4)
    assert raw.x[:, 0, 0, 0].tolist() == [10, 11, 10, 11, 20, 21, 20, 21, 30, 31, 30, 31]
    assert raw.y.tolist() == [0, 0, 1, 1] * 3
