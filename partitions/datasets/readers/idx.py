"""IDX files (LeCun et al.), plain or gzip."""

import gzip
import zlib
from pathlib import Path

import numpy as np

from partitions.datasets.readers.raw import Raw

UNSIGNED_BYTE = 0x08


def read_idx(path: Path) -> np.ndarray:
    """The array of an IDX file of unsigned bytes; ValueError naming a damaged file."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or no gzip file: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != UNSIGNED_BYTE:
        raise ValueError(f"{path} is no IDX file of unsigned bytes")
    start = 4 + 4 * data[3]
    shape = np.frombuffer(data[4:start], ">u4").astype(int)
    if len(data) != start + shape.prod():
        raise ValueError(f"{path} is truncated: {len(data)} bytes for an array of {tuple(shape)}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_mnist(folder: Path) -> Raw | None:
    """The four files of MNIST's form, training samples first; None if they are not there."""
    return read_pairs(folder, ("train", "t10k"))


def read_pairs(folder: Path, splits: tuple[str, str]) -> Raw | None:
    """`<split>-images-idx3-ubyte` and `<split>-labels-idx1-ubyte` of a training and a test split,
    each plain or gzip; None if one is not there."""
    parts = []
    for kind in ("images-idx3", "labels-idx1"):
        for split in splits:
            files = sorted(folder.glob(f"{split}-{kind}-ubyte*"))
            files = [file for file in files if file.suffix in ("", ".gz")]
            if not files:
                return None
            parts.append(read_idx(files[0]))
    x_train, x_test, y_train, y_test = parts
    for x, y, split in ((x_train, y_train, splits[0]), (x_test, y_test, splits[1])):
        if len(x) != len(y):
            raise ValueError(f"{folder}: {len(x)} {split} images, but {len(y)} labels")
    x = np.concatenate([x_train, x_test])
    y = np.concatenate([y_train, y_test])
    return Raw(x[:, None], y, len(x_train))
