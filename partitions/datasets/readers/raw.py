"""A dataset as read from its source."""

import hashlib
import logging
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.common.tasks import CLASSES
from partitions.datasets.description import Description

UNLABELED = -1  # the label of a sample that has none


@dataclass(frozen=True)
class Raw:
    """Inputs x (n, …) and labels y (n,) or (n, k), the `num_train` training samples first, then the
    `num_validation` samples of a validation split, then those of the test split."""

    x: np.ndarray
    y: np.ndarray
    num_train: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # names of the classes, if the files have them
    samples: tuple[str, ...] = ()  # names of the samples, if they are pictures
    notes: tuple[str, ...] = ()  # for the user: what the reader left out, chose or converted
    labeled: bool = True  # False: the source has no labels, and y is UNLABELED
    task: str = CLASSES  # what the labels mean; y is (n, k) for several labels and for values
    inputs: Description | None = None  # what x is; None: its shape says it
    num_validation: int = 0
    rows: tuple[int, ...] = ()  # of an array's rows, those that were kept, if some were left out
    words: tuple[str, ...] = ()  # of tokens 1, 2, …, among which a federation chooses
    owner: str = ""  # the column whose values the format says to be the clients

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray | None, num_train: int, **others: Any) -> "Raw":
        """Data whose source may have no labels: then y is None. `others` are further fields."""
        if y is None:
            unlabeled = np.full(len(x), UNLABELED)
            return cls(x, unlabeled, num_train, labeled=False, **others)
        return cls(x, y, num_train, **others)

    def noted(self, *notes: str) -> "Raw":
        """The same data with further notes."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))


def concatenate(parts: list[Raw]) -> Raw:
    """The parts of a dataset, in order: training, validation and test samples."""
    columns = {}
    for name in parts[0].columns:
        columns[name] = np.concatenate([part.columns[name] for part in parts])
    samples: list[str] = []
    notes: list[str] = []
    for part in parts:
        samples += part.samples
        notes += part.notes
    return Raw(
        x=np.concatenate([part.x for part in parts]),
        y=np.concatenate([part.y for part in parts]),
        num_train=sum(part.num_train for part in parts),
        columns=columns,
        classes=parts[0].classes,
        samples=tuple(samples),
        notes=tuple(dict.fromkeys(notes)),  # each note once
        labeled=all(part.labeled for part in parts),
        task=parts[0].task,
        inputs=parts[0].inputs,
        num_validation=sum(part.num_validation for part in parts),
        words=parts[0].words,
        owner=parts[0].owner,
    )


def files_of(folder: Path, base: str, archive: str, probe: str) -> Callable[[str], bytes] | None:
    """A function that reads a file by name, or None if there are no such files.

    It reads from `folder` if that holds `probe`, else from `folder`/`base`, else from the tar
    `archive`. It raises ValueError for a missing file."""
    place = folder if (folder / probe).is_file() else folder / base

    def from_folder(name: str) -> bytes:
        if not (place / name).is_file():
            raise ValueError(f"{place} has no file {name}")
        return (place / name).read_bytes()

    def from_archive(name: str) -> bytes:
        try:
            with tarfile.open(folder / archive) as tar:
                member = tar.extractfile(f"{base}/{name}")
                return member.read() if member else b""
        except (KeyError, EOFError, OSError, tarfile.TarError, zlib.error) as error:
            raise ValueError(f"{folder / archive}: no whole file {name} ({error})") from error

    if place.is_dir():
        return from_folder
    if (folder / archive).is_file():
        return from_archive
    return None


def is_official(data: bytes, md5: str, name: str) -> bool:
    """Whether the bytes have the official checksum. Logs a warning if they do not."""
    actual = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if actual != md5:
        logging.getLogger(__name__).warning("%s: md5 %s, not the official %s", name, actual, md5)
    return actual == md5
