"""The rows of each client, cached on disk.

flwr-datasets and its dependencies cost a process seconds and a hundred megabytes; once one process
of a machine has partitioned a dataset, the others do not need them. The key covers the
configuration, the dataset's files, this package's sources and the versions of the libraries."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from partitions.cache import cache_dir, save_arrays

TRAIN, VALIDATION, TEST = 0, 1, 2  # parts of a dataset
MAX_FILES = 200  # older ones are deleted


@dataclass(frozen=True)
class Assignment:
    """Rows of each client; `public` ones belong to no client. A `pooled` rule has partitioned
    training, validation and test rows separately. `attributes` describe each client."""

    rows: list[np.ndarray]
    public: np.ndarray
    pooled: bool
    attributes: list[dict[str, float | int | str]]


def cached_assignment(
    dataset: str, config: Mapping[str, object], make: Callable[[], Assignment]
) -> Assignment:
    """`make()`, or its cached result for the same dataset and configuration.

    `dataset` identifies the content; if it is empty, nothing is cached."""
    if not dataset:
        return make()
    text = json.dumps([dataset, _code(), sorted(config.items())])
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    file = cache_dir() / "deals" / f"{key}.safetensors"
    try:
        return _read(file)
    except (OSError, SafetensorError):
        assignment = make()
    with suppress(OSError):  # without a cache the next process partitions again
        _write(assignment, file)
    return assignment


@cache
def _code() -> str:
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    libraries = [version(name) for name in ("flwr-datasets", "datasets", "numpy")]
    return hashlib.blake2b(sources + repr(libraries).encode()).hexdigest()


def _write(assignment: Assignment, file: Path) -> None:
    """Write a temporary file, then rename it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "rows": np.concatenate(assignment.rows),
        "sizes": np.array([len(rows) for rows in assignment.rows]),
        "public": assignment.public,
    }
    about = json.dumps({"pooled": assignment.pooled, "attributes": assignment.attributes})
    handle, name = tempfile.mkstemp(dir=file.parent)
    os.close(handle)
    try:
        save_arrays(arrays, Path(name), {"about": about})
        Path(name).rename(file)
    finally:
        Path(name).unlink(missing_ok=True)
    for old in sorted(file.parent.glob("*.safetensors"), key=os.path.getmtime)[:-MAX_FILES]:
        old.unlink(missing_ok=True)


def _read(file: Path) -> Assignment:
    with safe_open(file, framework="numpy") as content:
        arrays = {name: content.get_tensor(name) for name in ("rows", "sizes", "public")}
        about = json.loads(content.metadata()["about"])
    rows = np.split(arrays["rows"], np.cumsum(arrays["sizes"])[:-1])
    return Assignment(rows, arrays["public"], about["pooled"], about["attributes"])
