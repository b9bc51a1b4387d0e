"""name → dataset as tensors, loaded once per process.

Image datasets come from ``data-dir`` (or $FEDAPPS_DATA_DIR) in their official files or in the
`datasets` library's form, else from the Hugging Face hub. They are converted once to uint8
arrays in a cache folder ($FEDAPPS_CACHE_DIR) and memory-mapped from there, so that all
processes of a machine share one copy."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from partitions import hub, idx
from partitions.raw import Raw

VERSION = 1  # of the cache's form


@dataclass(frozen=True)
class Info:
    """What is known of a dataset without reading it. `shape` is that of one input."""

    name: str
    shape: tuple[int, ...]
    num_classes: int
    line: str
    hub: str = ""  # canonical name on the hub
    read: Callable[[Path], Raw | None] | None = field(default=None, compare=False, repr=False)
    scale: float = 255.0  # largest value of an input as stored
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # natural columns
    num_types: int = 0  # kinds of inputs that users may prefer, if labels are users' tastes


@dataclass(frozen=True)
class Dataset:
    """Inputs x (n, *shape) as stored and labels y (n,) int64; rows < `num_train` are the
    official training split."""

    info: Info
    x: Tensor
    y: Tensor
    num_train: int
    columns: dict[str, np.ndarray]


DATASETS = {
    "digits": Info("digits", (1, 8, 8), 10, "1 797 digits of scikit-learn, embedded", scale=16.0),
    "mnist": Info("mnist", (1, 28, 28), 10, "70 000 digits", "ylecun/mnist", idx.read_mnist),
    "fashion-mnist": Info(
        "fashion-mnist",
        (1, 28, 28),
        10,
        "70 000 pieces of clothing",
        "zalando-datasets/fashion_mnist",
        idx.read_mnist,
        classes=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
    ),
}


def info(name: str) -> Info:
    """The entry of `name`; ValueError with the choices if there is none."""
    if name not in DATASETS:
        raise ValueError(f"unknown dataset {name!r}; known: {', '.join(DATASETS)}")
    return DATASETS[name]


def load(name: str, data_dir: str = "") -> Dataset:
    """The dataset `name`, the same object for every caller in a process.

    Raises ValueError for an unknown name, for damaged files, and where there is no source."""
    root = data_dir or os.environ.get("FEDAPPS_DATA_DIR", "")
    return _load(name, root)


@cache
def _load(name: str, root: str) -> Dataset:
    entry = info(name)
    if name == "digits":
        return _checked(entry, _digits(), "scikit-learn")
    folder = Path(root) / name if root else None
    if folder is not None and folder.is_dir():
        target = _cache_dir() / f"{name}-{_fingerprint(folder)}"
        if not target.is_dir():
            raw = hub.read_folder(folder) or (entry.read(folder) if entry.read else None)
            if raw is None:
                raise ValueError(f"{folder} holds neither {name}'s files nor a datasets folder")
            _store(_checked(entry, raw, str(folder)), target)
    else:
        target = _cache_dir() / f"{name}-hub"
        if not target.is_dir():
            _store(_checked(entry, _from_hub(entry, root), entry.hub), target)
    return _mapped(entry, target)


def _from_hub(entry: Info, root: str) -> Raw:
    try:
        return hub.read_hub(entry.hub)
    except (OSError, ValueError, ImportError) as error:
        where = f"{root}/{entry.name}" if root else f"<data-dir>/{entry.name}"
        raise ValueError(
            f"dataset {entry.name!r} was not found. Give it in one of three ways: its official "
            f"files in {where} (set data-dir or FEDAPPS_DATA_DIR); a folder of the datasets "
            f"library there (save_to_disk or parquet); or a network that reaches the hub for "
            f"{entry.hub!r} ({type(error).__name__})"
        ) from error


def _checked(entry: Info, raw: Raw, source: str) -> Dataset:
    """The raw arrays as a dataset; ValueError if shapes or labels are not the dataset's."""
    x = raw.x.reshape(len(raw.x), *entry.shape) if raw.x.ndim == len(entry.shape) else raw.x
    if x.shape[1:] != entry.shape:
        raise ValueError(f"{source}: inputs of shape {x.shape[1:]}, {entry.name} has {entry.shape}")
    if len(x) != len(raw.y):
        raise ValueError(f"{source}: {len(x)} inputs, but {len(raw.y)} labels")
    if len(raw.y) and not 0 <= raw.y.min() <= raw.y.max() < entry.num_classes:
        raise ValueError(
            f"{source}: labels {raw.y.min()}…{raw.y.max()} lie outside 0…{entry.num_classes - 1}"
        )
    y = torch.from_numpy(raw.y.astype(np.int64))
    return Dataset(entry, torch.from_numpy(np.ascontiguousarray(x)), y, raw.num_train, raw.columns)


def _digits() -> Raw:
    from sklearn.datasets import load_digits

    images = load_digits()
    x = images.images.astype(np.uint8)[:, None]
    return Raw(x, images.target, len(x))


def _cache_dir() -> Path:
    folder = os.environ.get("FEDAPPS_CACHE_DIR") or Path.home() / ".cache" / "fedapps"
    return Path(folder)


def _fingerprint(folder: Path) -> str:
    """Changes when a file of the folder does."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.blake2b(json.dumps([VERSION, stats]).encode(), digest_size=8).hexdigest()


def _store(dataset: Dataset, target: Path) -> None:
    """Write the arrays beside `target`, then rename; of two writers the first one wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent))
    np.save(temporary / "x.npy", dataset.x.numpy())
    np.save(temporary / "y.npy", dataset.y.numpy())
    for column, values in dataset.columns.items():
        np.save(temporary / f"column-{column}.npy", values)
    (temporary / "meta.json").write_text(json.dumps({"num_train": dataset.num_train}))
    try:
        temporary.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(temporary)


def _mapped(entry: Info, folder: Path) -> Dataset:
    """The stored arrays; x is memory-mapped copy-on-write, its pages shared by all processes."""
    x = np.load(folder / "x.npy", mmap_mode="c")
    columns = {
        f.stem.removeprefix("column-"): np.load(f) for f in sorted(folder.glob("column-*.npy"))
    }
    meta = json.loads((folder / "meta.json").read_text())
    y = torch.from_numpy(np.load(folder / "y.npy"))
    return Dataset(entry, torch.from_numpy(x), y, meta["num_train"], columns)
