"""iNaturalist and Landmarks as federated by Hsu et al. (ECCV 2020): csv splits over image folders.

`federated_train*.csv` has the columns user_id (an author, or a geographic cell), image_id and
class; `test.csv` the last two. Images lie anywhere below the folder: `<image_id>.jpg`, or, for
iNaturalist 2017, where its `train2017.json` and `val2017.json` say. They become MobileNetV2
features (ODPFL-HN, section 6.4); test rows belong to no user."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from partitions.datasets.features import mobilenet_v2
from partitions.datasets.readers.raw import Raw

if TYPE_CHECKING:
    from PIL.Image import Image


def read_inaturalist(folder: Path) -> Raw | None:
    """Features (n, 1280); the users are geographic cells."""
    return _read(folder, "cell")


def read_landmarks(folder: Path) -> Raw | None:
    """Features (n, 1280); the users are authors."""
    return _read(folder, "author")


def _read(folder: Path, column: str) -> Raw | None:
    splits = sorted(folder.rglob("federated_train*.csv"))
    if not splits:
        return None
    if len(splits) > 1:
        raise ValueError(f"{folder} has several splits, keep one: {', '.join(map(str, splits))}")
    test = splits[0].parent / "test.csv"
    rows = _rows(splits[0])
    num_train = len(rows)
    if test.is_file():
        rows += _rows(test)
    paths = _paths(folder)
    missing = [row["image_id"] for row in rows if row["image_id"] not in paths]
    if missing:
        raise ValueError(
            f"{splits[0]}: no image of {len(missing)} ids below {folder}, such as {missing[0]}"
        )
    images = _images([paths[row["image_id"]] for row in rows])
    x = mobilenet_v2(images, len(rows), folder.parent)
    users = np.array([row.get("user_id", "") for row in rows])
    y = np.array([int(row["class"]) for row in rows])
    return Raw(x, y, num_train, {column: users})


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, start=2):
        if not row.get("image_id") or not (row.get("class") or "").isdigit():
            raise ValueError(f"{path}, line {number}: no image_id and class in {row}")
    return rows


def _paths(folder: Path) -> dict[str, Path]:
    """Image id → file: file names, and the ids of iNaturalist's own index."""
    paths = {}
    for file in folder.rglob("*"):
        if file.suffix.lower() in (".jpg", ".jpeg", ".png"):
            paths[file.stem] = file
    for index in sorted(folder.rglob("*2017.json")):
        try:
            images = json.loads(index.read_text("utf-8"))["images"]
            names = {str(image["id"]): Path(image["file_name"]).stem for image in images}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is truncated or not iNaturalist's: {error}") from error
        for number, stem in names.items():
            if stem in paths:
                paths[number] = paths[stem]
    return paths


def _images(paths: list[Path]) -> "Iterator[Image]":
    from PIL import Image, UnidentifiedImageError

    for path in paths:
        try:
            yield Image.open(path).convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{path} is truncated or no image: {error}") from error
