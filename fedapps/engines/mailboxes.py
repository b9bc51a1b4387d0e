"""Mailboxes: files in memory by which two processes of one machine hand over what they made.

For a reply of a megabyte Ray's store costs the processes two milliseconds; to write it to memory
and read it again costs half of one."""

import errno
import os
import pickle
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

MEMORY = Path("/dev/shm")  # a file system in memory
LIMIT = 64 << 20  # bytes of a mailbox; what is larger is for a store that writes to disk when full


class Mailboxes:
    """Files in memory that hold one object each: one process puts it there, the other takes it.

    Opens those of `paths` that are there: on another machine none."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = [path for path in paths if Path(path).exists()]
        self._files = [os.open(path, os.O_RDWR) for path in self.paths]

    @classmethod
    def made(cls, count: int) -> Self:
        """So many new ones; none where no files in memory can be made."""
        paths = []
        with suppress(OSError):
            for _ in range(count):
                file, path = tempfile.mkstemp(dir=MEMORY)
                os.close(file)
                paths.append(path)
        return cls(paths)

    def __len__(self) -> int:
        return len(self._files)

    def put(self, number: int, thing: Any) -> Any:
        """None if the thing lies in the mailbox now, in place of what did; the thing itself if
        there is no such mailbox, it is too large, or memory is short."""
        if number >= len(self):
            return thing
        try:
            with open(self._start(number), "wb", closefd=False) as file:
                pickle.dump(thing, _Bounded(file), pickle.HIGHEST_PROTOCOL)
        except OSError:
            os.truncate(self._files[number], 0)
            return thing
        return None

    def take(self, number: int, thing: Any) -> Any:
        """What was put: the `thing` that `put` returned, or what lies in the mailbox."""
        if thing is not None:
            return thing
        with open(self._start(number), "rb", closefd=False) as file:
            return pickle.load(file)

    def _start(self, number: int) -> int:
        os.lseek(self._files[number], 0, os.SEEK_SET)
        return self._files[number]

    def hide(self) -> None:
        """Take their names away, once both have them open: their memory is freed with the
        processes, however they end."""
        for path in self.paths:
            Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Have none of them any more."""
        self.hide()
        while self._files:
            os.close(self._files.pop())


class _Bounded:
    """Writes to the file up to LIMIT; beyond it raises OSError, as a full one does."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, LIMIT

    def write(self, data: Any) -> None:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        self._file.write(data)
