"""The files of a user's data and their states, at any depth and behind links."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class FileState(NamedTuple):
    """A file as it was reached, and its path without links, its size in bytes and the time of its
    last change in nanoseconds since 1970."""

    path: str
    real_path: str
    size: int
    changed_ns: int


def file_states(place: Path, *, recursive: bool = True) -> Iterator[FileState]:
    """The states of the file `place`, or of the files in that folder; without `recursive` those in
    its subfolders are left out. Each folder counts once, and links to folders as `is_new` says.

    Files that cannot be read are left out. A file costs one call of the system, since data may
    have 100 000 of them."""
    if not place.is_dir():
        yield from _states("", os.path.realpath(place.parent), [str(place)])
        return
    root = place.resolve()
    visited = {root}
    for folder, subfolders, names in os.walk(place, followlinks=True):
        # os.walk continues with the folders that this list holds after the assignment.
        if recursive:
            subfolders[:] = [
                name for name in subfolders if is_new(Path(folder, name), root, visited)
            ]
        else:
            subfolders.clear()
        yield from _states(folder, os.path.realpath(folder), names)


def _states(folder: str, real_folder: str, names: list[str]) -> Iterator[FileState]:
    for name in names:
        path = os.path.join(folder, name)
        real_path = os.path.join(real_folder, os.path.basename(name))
        try:
            state = os.lstat(path)
            if stat.S_ISLNK(state.st_mode):
                state = os.stat(path)
                real_path = os.path.realpath(path)
        except OSError:  # a link to nothing, or a file that was removed meanwhile
            continue
        if stat.S_ISREG(state.st_mode):
            yield FileState(path, real_path, state.st_size, state.st_mtime_ns)


def is_new(folder: Path, root: Path, visited: set[Path]) -> bool:
    """Whether to read `folder`: it was not `visited` before, and it is no link into the data at
    `root`, which are read anyway, or to a folder around them."""
    target = folder.resolve()
    inside = target.is_relative_to(root) or root.is_relative_to(target)
    if target in visited or (folder.is_symlink() and inside):
        return False
    visited.add(target)
    return True
