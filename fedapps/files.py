"""Files written whole: to a temporary file, then renamed."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from clients.arrays import Arrays


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`; a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):  # on a read-only disk there is nothing to remove
            temporary.unlink(missing_ok=True)
        raise


def check_writable(folder: Path) -> None:
    """Raise ValueError if nothing can be written into `folder`, which need not be there yet."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error}); name another folder") from error


def write_text(path: Path, text: str) -> None:
    """Like `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Named arrays as safetensors."""
    write_bytes(path, save({name: np.asarray(a, order="C") for name, a in arrays.items()}))


def read_arrays(folder: Path) -> Arrays:
    """The model that a run left in its folder. Raises ValueError if there is no whole one."""
    file = folder / MODEL
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no {MODEL}; name the folder of a run, <method>-seed<seed>"
        )
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def best_round(folder: Path) -> int:
    """The round whose model a run left in its folder; 0 if it does not tell."""
    file = folder / "summary.json"
    return int(json.loads(file.read_text("utf-8"))["best_round"]) if file.is_file() else 0


MODEL = "model.safetensors"
HANDOUT = "handout.safetensors"  # models of its clients that a method may hand out
PRIVACY = "privacy.json"  # what its users have spent
