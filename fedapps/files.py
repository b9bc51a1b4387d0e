"""Locks on folders, and writes that survive a full disk. `fedapps.saved` reads what is written."""

import json
import math
import os
import platform
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from logging import ERROR, WARNING
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import tomli_w
from filelock import FileLock, Timeout
from flwr.common.logger import log
from safetensors.numpy import save

from clients.core.arrays import Arrays, num_bytes
from fedapps.common.lazy import lazy
from fedapps.common.new_files import append_to, create, errors_name

# What reads a run has moved; the former names stay for one release.
MOVED = (
    "MODEL",
    "HANDOUT",
    "WHICH",
    "CHECKPOINTS",
    "TOKEN",
    "of_round",
    "read_arrays",
    "read_json",
)
__getattr__ = lazy(__name__, dict.fromkeys(MOVED, "fedapps.saved"))

HEADER_SIZE = 8  # bytes of the length of a safetensors header; it is padded to a multiple
ERRORS = "errors.log"  # each cause of a failure once
PRIVACY = "privacy.json"  # what the run's users have spent
LOCK = ".lock"  # while a process uses the folder, or after one was killed
FORMAT = "1"  # of a run's files; docs/reference/run-folder.md describes it
LIBRARIES = ("fedapps", "flwr", "ray", "torch", "torchvision", "numpy", "flwr-datasets")
LOCK_SECONDS = 0.2  # longer than `in_use`, as of `fedapps status`, holds a lock
IN_MEMORY = 128 << 20  # bytes of clients' states that the server keeps in memory
ALIGNED = 64  # bytes at which an array begins


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock the folder for this process; a process that dies releases its locks.

    With `wait`, wait for another process; otherwise raise BlockingIOError if one has the lock."""
    file = folder / LOCK
    if file.is_symlink():
        file.unlink()
    lock = FileLock(file, timeout=-1 if wait else LOCK_SECONDS, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise _used(folder) from error
    except (OSError, NotImplementedError) as error:  # some network disks have no locks
        log(WARNING, "%s cannot be locked: %s", folder, error)
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # Windows removes no open file
                file.unlink(missing_ok=True)
            lock.release()


def _used(folder: Path) -> BlockingIOError:
    return BlockingIOError(
        f"another process uses the run in {folder}: wait for it, or choose another folder"
    )


def check_free(folder: Path) -> None:
    """Raise BlockingIOError if a process has locked the folder."""
    if in_use(folder):
        raise _used(folder)


def in_use(folder: Path) -> bool:
    """Whether a process has locked the folder."""
    file = folder / LOCK
    if not file.is_file() or file.is_symlink():
        return False
    lock = FileLock(file, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # of another user, or a disk without locks
        return False
    lock.release()
    return False


def write_files(contents: Mapping[Path, bytes], *, outdated: Iterable[Path] = ()) -> None:
    """Write files that belong together, in their order: none is replaced before the disk has taken
    all. A reader sees an old file or the new one, never a part. The `outdated` files of what was
    there before are removed, not before that either.

    A process that is killed between two replacements leaves old and new files. So the last one
    should vouch for the others, as a run's summary does (`fedapps.saved`)."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in contents}
    try:
        for path, data in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with errors_name(path, temporary[path]), create(temporary[path]) as file:
                file.write(data)
        for path in outdated:
            path.unlink(missing_ok=True)
        for path in contents:
            with errors_name(path, temporary[path]):
                os.replace(temporary[path], path)
    except BaseException:  # SIGTERM, too, which interrupts a worker process
        for unfinished in temporary.values():
            with suppress(OSError):  # a read-only disk has no such file
                unfinished.unlink(missing_ok=True)
        raise


def append_text(path: Path, text: str) -> None:
    """Append to a file, all of `text` or nothing of it."""
    with errors_name(path, path), append_to(path) as file:
        size = file.tell()
        try:
            _write_all(file, text.encode("utf-8"))
        except BaseException:  # SIGTERM, too
            file.truncate(size)
            raise


class Writer:
    """Writes what the disk takes, and retries the rest at the next write: a full or read-only disk
    ends no run. The first failure is logged, and the recovery."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.due: dict[str, Callable[[], None]] = {}  # writes that failed, by name
        self.error: OSError | None = None  # of the last try

    def write(self, what: str, write: Callable[[], None]) -> None:
        """Call `write`, which writes the present state of something, and retry failed writes."""
        self.due.pop(what, None)
        self.due[what] = write  # after the others that are due
        before = self.error
        self.error = None
        for name, due in list(self.due.items()):
            try:
                due()
            except OSError as error:
                self.error = error
            else:
                del self.due[name]
        if self.error is not None and before is None:
            sentence = "%s: %s is not written (%s); the run goes on and tries again"
            log(ERROR, sentence, self.folder, what, self.error)
        if self.error is None and before is not None:
            log(ERROR, "%s: everything is written again", self.folder)


def resume_command(folder: Path, references: Iterable[str] = ()) -> str:
    """The command that continues the unfinished runs in `folder`, which use code from outside the
    package by these `references`."""
    words = ["fedapps", "run", "--resume", str(folder)]
    for reference in dict.fromkeys(references):
        words += ["--allow", reference]
    return shlex.join(words)


def check_writable(folder: Path) -> None:
    """Raise ValueError if nothing can be written into `folder`, which need not exist yet."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = f"{error.strerror}: {existing}"  # without the name of the temporary file
        raise ValueError(f"{folder} cannot be written ({reason}); name another folder") from error


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8; a reader sees the old file or the new one."""
    write_files({path: text.encode("utf-8")})


def write_configuration(folder: Path, config: Mapping[str, Any], *, resumed: bool = False) -> None:
    """``config.toml``: a run's whole configuration, and the versions of its libraries. Its time is
    that of the run's beginning, also where the run is `resumed`."""
    file = folder / "config.toml"
    began = file.stat() if resumed and file.is_file() else None
    versions = library_versions() | {"python": platform.python_version(), "results": FORMAT}
    content = dict(config) | {"resume": False, "versions": versions}
    write_text(file, tomli_w.dumps(content))
    if began is not None:
        os.utime(file, ns=(began.st_atime_ns, began.st_mtime_ns))


@cache
def library_versions() -> dict[str, str]:
    """The installed versions of the package and of the libraries that decide a run's digits."""
    return {name: version(name) for name in LIBRARIES}


def write_arrays(path: Path, arrays: Arrays, metadata: dict[str, str] | None = None) -> None:
    """Write named arrays as safetensors."""
    write_files({path: array_bytes(arrays, metadata)})


def array_bytes(arrays: Arrays, metadata: dict[str, str] | None = None) -> bytes:
    """The content of a safetensors file, the same for the same arrays and metadata."""
    content = save({name: np.asarray(a, order="C") for name, a in arrays.items()}, metadata)
    if not metadata or len(metadata) == 1:
        return content
    # safetensors writes several entries of metadata in a random order.
    size = int.from_bytes(content[:HEADER_SIZE], "little")
    header = json.loads(content[HEADER_SIZE : HEADER_SIZE + size])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(math.ceil(len(text) / HEADER_SIZE) * HEADER_SIZE)
    arrays_part = memoryview(content)[HEADER_SIZE + size :]
    return b"".join((len(text).to_bytes(HEADER_SIZE, "little"), text, arrays_part))


def spill(states: Iterable[tuple[int, Arrays]], folder: Path) -> dict[int, Arrays]:
    """The arrays by client. Beyond the first IN_MEMORY bytes they are read-only views of an
    anonymous file in `folder`, or stay in memory if the disk does not take them."""
    result: dict[int, Arrays] = {}
    views: dict[int, dict[str, Callable[[bytes | mmap], np.ndarray]]] = {}
    held = 0  # bytes
    file: IO[bytes] | None = None
    content: bytes | mmap = b""
    with ExitStack() as opened:
        for client, arrays in states:
            result[client] = arrays
            held += num_bytes(arrays.values())
            if held <= IN_MEMORY:
                continue
            with suppress(OSError):
                if file is None:
                    file = opened.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
                views[client] = {name: _append_array(file, a) for name, a in arrays.items()}
                result[client] = {}
        # An empty file cannot be mapped. The mapping outlives the file, which has no name.
        if file is not None and file.tell():
            content = mmap(file.fileno(), 0, access=ACCESS_READ)
    for client, client_views in views.items():
        result[client] = {name: view(content) for name, view in client_views.items()}
    return result


def _append_array(file: IO[bytes], array: np.ndarray) -> Callable[[bytes | mmap], np.ndarray]:
    """Append an array; returns a function from the file's content to the array in it."""
    start = file.seek(ALIGNED * math.ceil(file.tell() / ALIGNED))
    _write_all(file, array.tobytes())
    # Kept apart, so that the function does not hold the array itself in memory.
    shape = array.shape
    dtype = array.dtype
    return lambda content: np.ndarray(shape, dtype, content, start)


def _write_all(file: IO[bytes] | BinaryIO, data: bytes) -> None:
    """Write `data` to an unbuffered file, which may take it in pieces."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
