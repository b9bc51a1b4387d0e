"""Files and folders that are made new: what a link leads to is never written, nor emptied.

A run's folder may be a copy of links, and a folder that others can write may hold a link that they
put there. A path that the user names, such as --output, may lead through links; what the package
puts into it does not."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file to write, in place of whatever file or link is there."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, mode), "wb")


def append_to(path: Path) -> BinaryIO:
    """A file to append to, without a buffer. A link, or one of several names of a file, is replaced
    by a copy first."""
    if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
        content = path.read_bytes() if path.is_file() else b""
        with replaced(path) as copy:
            copy.write_bytes(content)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK | BINARY
    return os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The path of a new file beside `path`, with the same ending, to write by its name. At the end
    it replaces `path`, unless an error is raised."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    with errors_name(path, temporary):
        create(temporary).close()
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def errors_name(path: Path, written: Path) -> Iterator[None]:
    """Inside, an OSError that names the `written` file, or no file as on a full disk, is raised as
    one that names `path`, which the written file is or will become. Other errors stay."""
    try:
        yield
    except OSError as error:
        is_of_written = error.filename is None or str(error.filename) == str(written)
        if error.errno is None or not is_of_written:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def make_folder(path: Path) -> None:
    """Make a folder of the package's own, and those around it; a link in its place is removed."""
    if path.is_symlink():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder and what is in it, as far as possible; of a link, the link alone."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


# Flags that not every system has.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
BINARY = getattr(os, "O_BINARY", 0)
