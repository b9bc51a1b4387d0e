"""Processes and a folder that are gone with this command, however it ends.

Everything that a command starts inherits an environment that names its household's folder. A small
process beside it waits until the command closes a pipe, or dies; then it ends what has that name
and removes the folder. It is this file, run by path, so that it loads nothing of ours."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

MEMBER = "FEDAPPS_HOUSEHOLD"  # the folder, in the environment of its processes
SECONDS = 10.0  # to end in order
GO_ON = "the rounds so far are written, and the same command goes on from the newest checkpoint"

IN_ORDER = b"."  # told before the pipe is closed
KILLED = f"fedapps was killed, perhaps by Ray, whose raylet's death ends it at once; {GO_ON}"


@contextmanager
def household() -> Iterator[Path]:
    """A new temporary folder. Once the context is left no process whose environment has its path
    as `MEMBER` is there any more, nor the folder."""
    # Ray's sockets lie in it, whose paths must be short: on macOS the usual one is too long.
    folder = tempfile.mkdtemp(prefix="fedapps-", dir="/tmp" if sys.platform == "darwin" else None)
    undertaker = subprocess.Popen(
        [sys.executable, "-I", __file__, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C and a closed terminal reach only the command
    )
    try:
        yield Path(folder)
    finally:
        undertaker.communicate(IN_ORDER)


def end(folder: str) -> None:
    """End the household's processes, at first in order, and remove its folder."""
    ordered = time.monotonic() + SECONDS
    for process in _members(folder):
        _signal(process, signal.SIGTERM)
    while (members := _members(folder)) and time.monotonic() < ordered + SECONDS:
        if time.monotonic() > ordered:
            for process in members:
                _signal(process, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def _members(folder: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _is_member(process, folder)]


def _is_member(process: psutil.Process, folder: str) -> bool:
    block = Path(f"/proc/{process.pid}/environ")
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if not sys.platform.startswith("linux"):
            return process.environ().get(MEMBER) == folder
        # psutil reads up to the first gap, which Ray's agents make when they write their titles
        return f"{MEMBER}={folder}\0".encode() in block.read_bytes()
    except (OSError, psutil.Error):  # it is gone, or somebody else's
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    if sys.stdin.buffer.read() != IN_ORDER:  # until the command closes it, or is dead
        print(KILLED, file=sys.stderr, flush=True)
    os.chdir("/")
    end(sys.argv[1])
