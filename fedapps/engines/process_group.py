"""A command's processes and temporary folder, removed when the command ends, however it ends.

The processes of a group inherit an environment variable that holds the path of the group's folder.
Ray's processes may lose it: a title that they set takes the place of their first variables, and
raylet gives them these in any order. They write logs in the folder, by which they are known.
A watcher process waits until the command closes a pipe or dies; it then ends the group's processes
and removes the folder. The watcher runs this file by its path, so it imports no package of ours."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

GROUP = "FEDAPPS_PROCESS_GROUP"  # environment variable that holds the group's folder
TERMINATE_SECONDS = 5.0  # between SIGTERM and SIGKILL
RESUME_HINT = "finished rounds are saved; the same command resumes from the newest checkpoint"
PREFIX = "fedapps-"
SHORT_FOLDER = "/tmp"
MAX_SOCKET = 107 if sys.platform.startswith("linux") else 103  # bytes of a socket's path
# What Ray appends, with the longest process id: the folder's name, a session's, and a socket's.
SOCKET = f"/{PREFIX}12345678/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
MAX_FOLDER = MAX_SOCKET - len(SOCKET)
MIN_FREE = 20_000_000  # bytes for logs of Ray and for a copy of the app
RAY_TITLE = "ray::"  # how the titles of Ray's processes begin
ORDERLY = b"."  # written to the pipe by a command that ends the group itself
KILLED = f"fedapps was killed, perhaps by Ray: it ends a process whose raylet died; {RESUME_HINT}"


@contextmanager
def process_group() -> Iterator[Path]:
    """A new temporary folder. On exit, the folder is removed and every process whose environment
    has its path as `GROUP` is ended."""
    from fedapps.common.signals import delayed  # not in the watcher

    watcher = None
    try:
        with delayed():  # a folder without a watcher would remain
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=_parent_folder())
            watcher = subprocess.Popen(
                [sys.executable, "-I", __file__, folder],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C and a closed terminal reach only the command
            )
        yield Path(folder)
    finally:
        if watcher is not None:
            watcher.communicate(ORDERLY)


def _parent_folder() -> str:
    """`short_folder`. Raises RuntimeError if it is full: Ray would wait for minutes."""
    folder = short_folder()
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE:
        raise RuntimeError(
            f"the folder for temporary files, {folder}, has {free / 1e6:.3g} MB left, and at least "
            f"{MIN_FREE / 1e6:.3g} MB are needed; make room there, or set TMPDIR to another folder"
        )
    return folder


def short_folder() -> str:
    """The folder for temporary files, or another one if the paths of Ray's sockets would be too
    long there. Raises RuntimeError if no folder will do."""
    folder = tempfile.gettempdir()
    if (
        sys.platform == "win32" or len(os.fsencode(folder)) <= MAX_FOLDER
    ):  # Windows: no such sockets
        return folder
    if os.access(SHORT_FOLDER, os.W_OK | os.X_OK):
        return SHORT_FOLDER
    raise RuntimeError(
        f"the folder for temporary files, {folder}, has more than {MAX_FOLDER} bytes in its path, "
        f"which is too long for sockets, and {SHORT_FOLDER} cannot be written; set TMPDIR to a "
        "shorter folder, or take --engine in-process"
    )


def end_group(folder: str) -> None:
    """Send SIGTERM to the group's processes, SIGKILL to those that remain; remove the folder."""
    deadline = time.monotonic() + TERMINATE_SECONDS
    _end(_members(folder), psutil.Process.terminate)
    while (members := _members(folder)) and time.monotonic() < deadline + TERMINATE_SECONDS:
        if time.monotonic() > deadline:
            _end(members, psutil.Process.kill)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def _members(folder: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _is_member(process, folder)]


def _is_member(process: psutil.Process, folder: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if _has_variable(process, folder):
            return True
        is_rays = "".join(process.cmdline()[:1]).startswith(RAY_TITLE)
        return is_rays and any(Path(folder) in Path(f.path).parents for f in process.open_files())
    except (OSError, psutil.Error):  # it has ended, or belongs to another user
        return False


def _has_variable(process: psutil.Process, folder: str) -> bool:
    if not sys.platform.startswith("linux"):
        return process.environ().get(GROUP) == folder
    # psutil stops at the first gap in the block, which a title leaves.
    return f"{GROUP}={folder}\0".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()


def _end(processes: list[psutil.Process], end: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            end(process)


if __name__ == "__main__":
    if sys.stdin.buffer.read() != ORDERLY:  # returns when the command closes the pipe or dies
        print(KILLED, file=sys.stderr, flush=True)
    os.chdir("/")
    end_group(sys.argv[1])
