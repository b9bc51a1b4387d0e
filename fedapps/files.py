"""Files written whole: to a temporary file, then renamed. A full disk is lived with."""

import fcntl
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from logging import ERROR, WARNING
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any

import numpy as np
from flwr.common.logger import log
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from clients.arrays import Arrays, num_bytes


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """No other process is at the folder meanwhile; one that dies, in whatever way, lets it go.

    With `wait` until the other one is done; otherwise raises BlockingIOError if there is one."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another process is at the run in {folder}: wait for it, or choose another folder"
            ) from error
        except OSError as error:  # not every network's disk has locks
            log(WARNING, "%s cannot be locked: %s", folder, error)
        yield
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`; a reader sees the old file or the new one, never a part."""
    write_files({path: data})


def write_files(contents: Mapping[Path, bytes]) -> None:
    """The same for files that belong together: none is the new one unless the disk took all."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in contents}
    try:
        for path, data in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary[path].write_bytes(data)
        for path in contents:
            os.replace(temporary[path], path)
    except OSError:
        for file in temporary.values():
            with suppress(OSError):  # on a read-only disk there is nothing to remove
                file.unlink(missing_ok=True)
        raise


def append_text(path: Path, text: str) -> None:
    """Append to a file, all of `text` or nothing of it."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            _write_all(file, text.encode("utf-8"))
        except OSError:
            file.truncate(size)
            raise


class Writer:
    """Writes what it can, and the rest with what comes next: a disk that is full or read-only ends
    no run. It says so once, and when all is written again."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.due: dict[str, Callable[[], None]] = {}  # what is not written, by its name
        self.error: OSError | None = None  # of the last try

    def write(self, what: str, write: Callable[[], None]) -> None:
        """Call `write`, which writes the present state of something, and what failed before it."""
        self.due[what] = write
        before, self.error = self.error, None
        for name, due in list(self.due.items()):
            try:
                due()
            except OSError as error:
                self.error = error
            else:
                del self.due[name]
        if self.error is not None and before is None:
            told = "%s: %s is not written (%s); the run goes on and tries again"
            log(ERROR, told, self.folder, what, self.error)
        if self.error is None and before is not None:
            log(ERROR, "%s: everything is written again", self.folder)


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


def write_arrays(path: Path, arrays: Arrays, told: dict[str, str] | None = None) -> None:
    """Named arrays as safetensors, with what its header is `told`."""
    write_bytes(path, array_bytes(arrays, told))


def array_bytes(arrays: Arrays, told: dict[str, str] | None = None) -> bytes:
    """What such a file holds."""
    return save({name: np.asarray(a, order="C") for name, a in arrays.items()}, told)


def read_arrays(folder: Path) -> Arrays:
    """The model that a run left in its folder. Raises ValueError if there is no whole one."""
    file = folder / MODEL
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no {MODEL}; name the folder of a run, <method>-seed<seed>"
        )
    return load_arrays(file)


def aside(memories: Iterable[tuple[int, Arrays]], folder: Path) -> dict[int, Arrays]:
    """The arrays by client. Beyond the first IN_MEMORY bytes they lie, read-only, in a file without
    a name in `folder`, which goes with them; in memory where the disk does not take them."""
    found: dict[int, Arrays] = {}
    views: dict[int, dict[str, Callable[[bytes | mmap], np.ndarray]]] = {}
    held, file = 0, None
    there: bytes | mmap = b""
    with ExitStack() as opened:
        for client, arrays in memories:
            found[client] = arrays
            held += num_bytes(arrays.values())
            if held <= IN_MEMORY:
                continue
            with suppress(OSError):
                if file is None:
                    file = opened.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
                views[client] = {name: _append_array(file, a) for name, a in arrays.items()}
                found[client] = {}
        if file is not None and file.tell():
            there = mmap(file.fileno(), 0, access=ACCESS_READ)
    for client, own in views.items():
        found[client] = {name: view(there) for name, view in own.items()}
    return found


def _append_array(file: IO[bytes], array: np.ndarray) -> Callable[[bytes | mmap], np.ndarray]:
    """What makes the array out of the file's bytes."""
    start = file.seek(ALIGNED * math.ceil(file.tell() / ALIGNED))
    _write_all(file, array.tobytes())
    shape, dtype = array.shape, array.dtype
    return lambda there: np.ndarray(shape, dtype, there, start)


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write `data` to an unbuffered file, which may take it in pieces."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def load_arrays(file: Path) -> Arrays:
    """The arrays of a safetensors file. Raises ValueError if it is damaged."""
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def read_json(file: Path) -> Any:
    """What a file of JSON holds. Raises ValueError if it is damaged."""
    try:
        return parse_json(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def parse_json(text: str) -> Any:
    """What a text of JSON tells. Raises ValueError for what is none, nested too deep, or holds
    whole numbers that no float could."""
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def best_round(folder: Path) -> int:
    """The round whose model a run left in its folder; 0 if it does not tell. ValueError for what
    is no round."""
    file = folder / "summary.json"
    told = read_json(file) if file.is_file() else {}
    number = told.get("best_round", 0) if isinstance(told, dict) else None
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{file} is damaged: its best_round is {number!r:.100}")
    return number


@contextmanager
def opening(folder: Path) -> Iterator[None]:
    """Around the use of a saved run, which a stranger may have written: whatever its files provoke
    in the code that takes them for whole is a ValueError that names the folder."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError,
            SafetensorError) as error:  # fmt: skip
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{folder} cannot be used; a file in it is damaged ({told})") from error


DIGITS = 100  # of a whole number; no run has longer ones, and no float holds those of 310
MODEL = "model.safetensors"
HANDOUT = "handout.safetensors"  # models of its clients that a method may hand out
PRIVACY = "privacy.json"  # what its users have spent
IN_MEMORY = 128 << 20  # bytes of what clients keep that the server has in memory
ALIGNED = 64  # bytes at which an array begins
TOKEN = "token.json"  # by which nodes know what they kept of the run
