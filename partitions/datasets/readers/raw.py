"""A dataset as read from its source."""

import hashlib
import logging
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

UNLABELED = -1  # the label of a sample that has none


@dataclass(frozen=True)
class Raw:
    """Inputs x (n, …) and labels y (n,), the `num_train` training samples first."""

    x: np.ndarray
    y: np.ndarray
    num_train: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # names, where the files have them
    samples: tuple[str, ...] = ()  # names of the samples, where they are pictures
    notes: tuple[str, ...] = ()  # what was left out, preferred or converted, for the user
    labeled: bool = True  # whether labels were given; if not, y is UNLABELED

    def noted(self, *notes: str) -> "Raw":
        """The same data with further notes."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))


def concatenate(parts: list[Raw]) -> Raw:
    """The parts of a dataset, in order; training samples come first."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in
               parts[0].columns}  # fmt: skip
    return Raw(
        np.concatenate([part.x for part in parts]),
        np.concatenate([part.y for part in parts]),
        sum(part.num_train for part in parts),
        columns,
        parts[0].classes,
        tuple(name for part in parts for name in part.samples),
        tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        all(part.labeled for part in parts),
    )


def files_of(folder: Path, base: str, archive: str, probe: str) -> Callable[[str], bytes] | None:
    """A function that reads a file: from `folder`/`base`, from `folder` if it holds `probe`, or
    from the tar `archive`; None if all are missing. It raises ValueError for a missing file."""
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
    return from_archive if (folder / archive).is_file() else None


def is_official(data: bytes, md5: str, name: str) -> bool:
    """Whether the bytes have the official checksum; a warning if not."""
    actual = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if actual != md5:
        logging.getLogger(__name__).warning("%s: md5 %s, not the official %s", name, actual, md5)
    return actual == md5
