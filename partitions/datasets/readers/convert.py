"""Arrays of a user's data in the forms that datasets have: inputs, and parts joined to one."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedapps.common.memory_limits import check_size
from partitions.datasets.labels import Labels, named, numbered, one_hot_classes, one_per_sample
from partitions.datasets.readers.raw import Raw, concatenate

MAX_FLOAT = 10.0  # larger floats in images are hardly scaled or standardized

logger = logging.getLogger(__name__)


def scaled_pixels(
    x: np.ndarray, source: Path | str, whole: bool = False, notes: list[str] | None = None
) -> np.ndarray:
    """Inputs as uint8 (0 … 255) or float32, other whole numbers as int64 if `whole`; images
    (n, H, W) and (n, H, W, C) with the channels first. Unless `whole`, whole numbers in images are
    bytes: ValueError for others than 0 … 255. What a user should know is added to `notes`, or
    logged if there are none."""
    if x.dtype.kind not in "uif" or x.ndim < 2:
        raise ValueError(f"{source}: inputs are {x.dtype} {x.shape}; numbers (n, …) are needed")
    remarks: list[str] = []
    converted = np.int64 if whole and x.dtype.kind in "ui" else np.float32
    pixels = x.dtype == np.uint8 or (not whole and _are_bytes(x, source, remarks))
    for remark in remarks if notes is None else ():
        logger.warning("%s", remark)
    if notes is not None:
        notes += remarks
    dtype = np.dtype(np.uint8 if pixels else converted)
    check_size(dtype.itemsize * x.size, source)
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and (
        (x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)) or (x.shape[3] == 4 < x.shape[1])
    ):
        x = x.transpose(0, 3, 1, 2)
    x = x.astype(dtype, copy=False)
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        finite = np.isfinite(x).reshape(len(x), -1).all(1)
        raise ValueError(
            f"{source}: inputs hold NaN or infinity, the first in sample {int(finite.argmin())}; "
            "fill it in, or leave such samples out"
        )
    return x


def _are_bytes(x: np.ndarray, source: Path | str, remarks: list[str]) -> bool:
    """Whether x is an array of images of whole numbers, which must be 0 … 255. A remark for large
    floats, and for whole numbers that are no uint8."""
    if x.ndim < 3 or not x.size or x.dtype == np.uint8:
        return False
    low, high = x.min(), x.max()
    if x.dtype.kind == "f":
        if max(-low, high) > MAX_FLOAT:
            remarks.append(
                f"{source}: images hold floats from {low:g} to {high:g}; only bytes (whole numbers "
                "from 0 to 255) are divided by 255"
            )
        return False
    if low < 0 or high > 255:
        raise ValueError(
            f"{source}: images hold whole numbers from {low} to {high}; give bytes from 0 to 255, "
            "or scale them to [0, 1] and store them as float32"
        )
    remarks.append(
        f"{source}: {x.dtype} images hold whole numbers up to {high}; they are divided by 255, as "
        "bytes are"
    )
    return True


def labels_of(y: np.ndarray, source: Path | str, notes: list[str]) -> np.ndarray:
    """The labels of a part, one for each sample, as `one_per_sample`; one-hot rows as numbers, with
    a note."""
    if y.ndim == 2 and (count := one_hot_classes(y)):
        notes.append(f"{source}: labels are one-hot: {count} classes")
        return y.argmax(1)
    return one_per_sample(y, str(source))


def joined(parts: list[Raw], source: Path | str, later: bool = False) -> Raw:
    """Parts of one dataset, their labels as classes 0, 1, … by
    `partitions.datasets.labels`. For a `later` client numbers stay as they are: the run has
    numbered its classes."""
    for part in parts:
        if part.y.shape != part.x.shape[:1]:
            raise ValueError(f"{source}: {len(part.x)} inputs, but {part.y.size} labels")
        if part.x.shape[1:] != parts[0].x.shape[1:] or part.x.dtype != parts[0].x.dtype:
            raise ValueError(f"{source}: training and test inputs differ in shape or type")
        if missing := sorted(parts[0].columns.keys() - part.columns.keys()):
            raise ValueError(
                f"{source}: the training samples have columns that the test samples lack: "
                f"{', '.join(missing)}; both need them"
            )
        if (part.y.dtype.kind == "U") != (parts[0].y.dtype.kind == "U"):
            raise ValueError(
                f"{source}: training and test labels differ in type; give both as texts or both as "
                "numbers"
            )
    raw = concatenate(parts)
    if raw.classes or not raw.labeled:
        return raw
    labels = _later(raw.y) if later else numbered(raw.y)
    raw = replace(raw, y=labels.y, classes=labels.classes)
    return raw.noted(f"{source}: {labels.note}") if labels.note else raw


def _later(y: np.ndarray) -> Labels:
    return named(y) if y.dtype.kind == "U" else Labels(y.astype(np.int64))
