"""Which rows each client was dealt, kept beside the dataset.

flwr-datasets and what it brings cost a process seconds and a hundred megabytes; where one process
of a machine has dealt a dataset, the others need them not. The key covers the configuration, the
dataset's files, this package's sources and the libraries that draw."""

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

TRAIN, VALIDATION, TEST = 0, 1, 2  # parts that a pooled rule divides apart
MOST = 200  # deals that are kept; older ones go


@dataclass(frozen=True)
class Deal:
    """Rows of each client; `public` ones are nobody's. A `pooled` rule has divided training,
    validation and test rows apart. `attributes` describe each client."""

    rows: list[np.ndarray]
    public: np.ndarray
    pooled: bool
    attributes: list[dict[str, float | int | str]]


def remembered(dataset: str, config: Mapping[str, object], make: Callable[[], Deal]) -> Deal:
    """`make()`, or what it gave for the same dataset and configuration before.

    `dataset` tells its content; where it is empty, nothing is kept."""
    if not dataset:
        return make()
    text = json.dumps([dataset, _code(), sorted(config.items())])
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    file = cache_dir() / "deals" / f"{key}.safetensors"
    try:
        return _read(file)
    except (OSError, SafetensorError):
        deal = make()
    with suppress(OSError):  # nowhere to keep it: the next process deals itself
        _write(deal, file)
    return deal


@cache
def _code() -> str:
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    libraries = [version(name) for name in ("flwr-datasets", "datasets", "numpy")]
    return hashlib.blake2b(sources + repr(libraries).encode()).hexdigest()


def _write(deal: Deal, file: Path) -> None:
    """Whole or not at all: a temporary file, then a rename."""
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "rows": np.concatenate(deal.rows),
        "sizes": np.array([len(rows) for rows in deal.rows]),
        "public": deal.public,
    }
    about = json.dumps({"pooled": deal.pooled, "attributes": deal.attributes})
    handle, name = tempfile.mkstemp(dir=file.parent)
    os.close(handle)
    try:
        save_arrays(arrays, Path(name), {"about": about})
        Path(name).rename(file)
    finally:
        Path(name).unlink(missing_ok=True)
    for old in sorted(file.parent.glob("*.safetensors"), key=os.path.getmtime)[:-MOST]:
        old.unlink(missing_ok=True)


def _read(file: Path) -> Deal:
    with safe_open(file, framework="numpy") as content:
        arrays = {name: content.get_tensor(name) for name in ("rows", "sizes", "public")}
        about = json.loads(content.metadata()["about"])
    rows = np.split(arrays["rows"], np.cumsum(arrays["sizes"])[:-1])
    return Deal(rows, arrays["public"], about["pooled"], about["attributes"])
