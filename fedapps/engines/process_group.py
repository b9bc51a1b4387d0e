"""A command's processes and temporary folder, removed when the command ends, however it ends.

The processes of a group inherit an environment variable that holds the path of the group's folder.
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
TERMINATE_SECONDS = 10.0  # between SIGTERM and SIGKILL
RESUME_HINT = "finished rounds are saved; the same command resumes from the newest checkpoint"
ORDERLY = b"."  # written to the pipe by a command that ends the group itself
KILLED = f"fedapps was killed, perhaps by Ray: it ends a process whose raylet died; {RESUME_HINT}"


@contextmanager
def process_group() -> Iterator[Path]:
    """A new temporary folder. On exit, the folder is removed and every process whose environment
    has its path as `GROUP` is ended."""
    # Ray creates sockets in the folder, and macOS's default temporary path is too long for them.
    folder = tempfile.mkdtemp(prefix="fedapps-", dir="/tmp" if sys.platform == "darwin" else None)
    watcher = subprocess.Popen(
        [sys.executable, "-I", __file__, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C and a closed terminal reach only the command
    )
    try:
        yield Path(folder)
    finally:
        watcher.communicate(ORDERLY)


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
        if not sys.platform.startswith("linux"):
            return process.environ().get(GROUP) == folder
        # psutil stops at the first gap in the block; Ray's agents leave one when they set a title.
        return f"{GROUP}={folder}\0".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
    except (OSError, psutil.Error):  # it has ended, or belongs to another user
        return False


def _end(processes: list[psutil.Process], end: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            end(process)


if __name__ == "__main__":
    if sys.stdin.buffer.read() != ORDERLY:  # returns when the command closes the pipe or dies
        print(KILLED, file=sys.stderr, flush=True)
    os.chdir("/")
    end_group(sys.argv[1])
