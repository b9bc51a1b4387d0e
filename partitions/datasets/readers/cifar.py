"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): the python batches, as folder or tar.gz.

The batches are pickles, which can run code. A batch is opened only if its checksum is the one that
torchvision knows."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from partitions.datasets.readers.raw import Raw, files_of, is_official


def read_cifar10(folder: Path) -> Raw | None:
    """Images (n, 3, 32, 32) of CIFAR-10."""
    return _read(folder, 10)


def read_cifar100(folder: Path) -> Raw | None:
    """Images (n, 3, 32, 32) of CIFAR-100; column "coarse" names their superclasses."""
    return _read(folder, 100)


def _read(folder: Path, number: int) -> Raw | None:
    from torchvision import datasets

    table = {10: datasets.CIFAR10, 100: datasets.CIFAR100}[number]
    get = files_of(folder, table.base_folder, table.filename, table.train_list[0][0])
    if get is None:
        return None
    meta = _verified(get, table.meta["filename"], table.meta["md5"], folder)
    label_key = "fine_labels" if number == 100 else "labels"
    batches = []
    x = []
    y = []
    for name, md5 in [*table.train_list, *table.test_list]:
        batch = _verified(get, name, md5, folder)
        batches.append(batch)
        x.append(_images(batch, label_key, f"{folder}: {name}"))
        y.append(np.asarray(batch[label_key], np.int64))
    num_train = sum(len(images) for images in x[: len(table.train_list)])
    columns = {}
    if number == 100:
        coarse = np.concatenate([batch["coarse_labels"] for batch in batches])
        columns["coarse"] = np.array(meta["coarse_label_names"])[coarse]
    classes = tuple(meta[table.meta["key"]])
    return Raw(np.concatenate(x), np.concatenate(y), num_train, columns, classes)


def _verified(get: Callable[[str], bytes], name: str, md5: str, folder: Path) -> dict:
    """The content of a pickle with this checksum; ValueError for any other file."""
    data = get(name)
    if not is_official(data, md5, f"{folder}: {name}"):
        raise ValueError(
            f"{folder}: {name} is truncated or not CIFAR's (its checksum is not {md5}); "
            "it is a pickle, so it was not opened"
        )
    return pickle.loads(data, encoding="latin1")


def _images(batch: dict, labels: str, name: str) -> np.ndarray:
    x = np.asarray(batch["data"])
    if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072 or len(x) != len(batch[labels]):
        raise ValueError(f"{name}: {x.dtype} {x.shape} and {len(batch[labels])} labels")
    return x.reshape(-1, 3, 32, 32)
