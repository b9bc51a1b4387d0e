"""FEMNIST (Caldas et al., LEAF, 2018): LEAF's JSON with writers, or EMNIST's by-class IDX files.

LEAF's images are dark on light, as published; EMNIST's are stored transposed and light on dark,
and come without writers."""

from pathlib import Path

import numpy as np

from partitions.datasets.catalog import CHARACTERS
from partitions.datasets.readers.idx import read_pairs
from partitions.datasets.readers.leaf import files_of_split, users_of
from partitions.datasets.readers.raw import Raw, concatenate


def read_femnist(folder: Path) -> Raw | None:
    """Images (n, 1, 28, 28), with column "writer" from LEAF's files."""
    train_files = files_of_split(folder, "train")
    if train_files:
        parts = [_leaf(path, train=True) for path in train_files]
        parts += [_leaf(path, train=False) for path in files_of_split(folder, "test")]
        return concatenate(parts)
    raw = read_pairs(folder, ("emnist-byclass-train", "emnist-byclass-test"))
    if raw is None:
        return None
    x = np.ascontiguousarray(255 - raw.x.transpose(0, 1, 3, 2))
    return Raw(x, raw.y, raw.num_train, classes=CHARACTERS)


def _leaf(path: Path, *, train: bool) -> Raw:
    """One file: {"user_data": {writer: {"x": [[784 numbers in [0, 1]]], "y": [label]}}}."""
    inputs: list[list[float]] = []
    labels: list[int] = []
    writer_of: list[str] = []
    try:
        for writer, samples in users_of(path):
            inputs += samples["x"]
            labels += samples["y"]
            writer_of += [writer] * len(samples["y"])
        x = np.array(inputs, np.float32)
        y = np.array(labels, np.int64)
        writers = np.array(writer_of)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is truncated or not LEAF's: {error}") from error
    if x.shape != (len(y), 784) or (len(y) and not 0 <= x.min() <= x.max() <= 1):
        raise ValueError(f"{path}: inputs of shape {x.shape} for {len(y)} labels")
    if len(y) and not 0 <= y.min() <= y.max() < len(CHARACTERS):
        raise ValueError(f"{path}: labels {y.min()}…{y.max()} lie outside 0…{len(CHARACTERS) - 1}")
    images = np.round(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28)
    num_train = len(y) if train else 0
    return Raw(images, y, num_train, {"writer": writers}, CHARACTERS)
