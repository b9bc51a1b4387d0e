"""Converted datasets on disk, memory-mapped by every process of a machine.

The folder is $FEDAPPS_CACHE_DIR, else ~/.cache/fedapps; an entry is a safetensors file and a JSON
file."""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from partitions.readers.raw import Raw

VERSION = 3  # of the format and of the readers' results
DATA, META = "data.safetensors", "meta.json"


def cache_dir() -> Path:
    """The cache's folder."""
    return Path(os.environ.get("FEDAPPS_CACHE_DIR") or Path.home() / ".cache" / "fedapps")


def fingerprint(folder: Path) -> str:
    """A hash of the paths, sizes and times of the file, or of the folder's files."""
    files = sorted(f for f in (folder, *folder.rglob("*")) if f.is_file())
    stats = [(str(f.resolve()), (s := f.stat()).st_size, s.st_mtime_ns) for f in files]
    return hashlib.blake2b(json.dumps([VERSION, stats]).encode(), digest_size=8).hexdigest()


def cached(key: str, read: Callable[[], Raw]) -> Raw:
    """The entry `key`, memory-mapped; a missing entry is first read and written.

    Of several processes that write at once the first one's entry stays. If the cache cannot be
    written or read, the arrays stay in memory, with a warning."""
    target = cache_dir() / key
    try:
        if target.is_dir():
            return _mapped(target)
    except OSError as error:
        _warn(target, error)
        return read()
    raw = read()
    try:
        _store(raw, target)
        return _mapped(target)
    except OSError as error:
        _warn(target, error)
        return raw


def save_arrays(
    arrays: Mapping[str, np.ndarray], file: Path, about: dict[str, str] | None = None
) -> None:
    """Write a safetensors file. Raises OSError if the disk fails, as other writers do."""
    try:
        save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, file, about)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _warn(target: Path, error: OSError) -> None:
    logging.getLogger(__name__).warning(
        "no dataset can be kept as %s (%s): every process has its own copy; set FEDAPPS_CACHE_DIR",
        target, error,
    )  # fmt: skip


def _store(raw: Raw, target: Path) -> None:
    """Write the arrays beside `target`, then rename; the first of two writers wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}."))
    try:
        temporary = private / target.name
        temporary.mkdir()  # unlike mkdtemp's, with the umask's permissions
        arrays = {"x": raw.x, "y": raw.y.astype(np.int64)}
        names = {}
        for column, values in raw.columns.items():
            unique, arrays[f"column.{column}"] = np.unique(values, return_inverse=True)
            names[column] = unique.tolist()
        save_arrays(arrays, temporary / DATA)
        (temporary / DATA).chmod(temporary.stat().st_mode & 0o666)  # safetensors makes it private
        meta = {"num_train": raw.num_train, "classes": raw.classes, "columns": names}
        (temporary / META).write_text(json.dumps(meta), "utf-8")
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _mapped(target: Path) -> Raw:
    """The stored arrays, mapped copy-on-write: processes share the pages that none writes."""
    from safetensors.torch import load_file

    arrays = {name: tensor.numpy() for name, tensor in load_file(target / DATA).items()}
    meta = json.loads((target / META).read_text("utf-8"))
    columns = {
        name: np.array(values)[arrays[f"column.{name}"]] for name, values in meta["columns"].items()
    }
    return Raw(arrays["x"], arrays["y"], meta["num_train"], columns, tuple(meta["classes"]))
