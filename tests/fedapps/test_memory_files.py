"""Files in memory: one process reads what another wrote; nothing stays."""

import multiprocessing
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedapps.engines import memory_files
from fedapps.engines.memory_files import MEMORY, MemoryFiles

if not MEMORY.is_dir():
    pytest.skip("no files in memory on this system", allow_module_level=True)


@pytest.fixture
def files():
    made = MemoryFiles.create(2)
    yield made
    made.close()


def double(paths, queue):
    opened = MemoryFiles(paths)
    queue.put([opened.write(i, opened.read(i, None) * 2) for i in (0, 1)])


def test_another_process_reads_and_writes(files):
    values = [np.arange(300_000.0), "short"]
    assert [files.write(number, value) for number, value in enumerate(values)] == [None, None]
    forking = multiprocessing.get_context("fork")  # a new process would import torch
    queue = forking.SimpleQueue()
    process = forking.Process(target=double, args=(files.paths, queue))
    process.start()
    assert queue.get() == [None, None]
    process.join()
    assert np.array_equal(files.read(0, None), values[0] * 2)
    for _ in range(2):  # although it is shorter than what was there before
        assert files.read(1, None) == "shortshort"


def test_what_does_not_fit_is_returned_and_nothing_is_kept(files, monkeypatch):
    """Too large a value, a system short of memory, a file that does not exist, no system of files
    in memory."""
    value = np.zeros(100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        assert files.write(0, value) is value
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.stat(files.paths[0]).st_size == 0
    assert files.write(0, value) is None
    monkeypatch.setattr(memory_files, "LIMIT", 1000)
    assert files.write(0, bytes(800)) is None
    assert files.write(0, value) is value is files.read(0, value)
    assert os.stat(files.paths[0]).st_size == 0
    assert MemoryFiles(["/nowhere/at/all"]).write(0, value) is value
    monkeypatch.setattr(memory_files, "MEMORY", Path("/nowhere"))
    assert len(MemoryFiles.create(2)) == 0


def test_unlinked_files_still_work_and_closed_ones_leave_none(files):
    other = MemoryFiles(files.paths)
    files.unlink()
    assert not any(Path(path).exists() for path in files.paths)
    files.write(1, {"a": 1})
    assert other.read(1, None) == {"a": 1}
    other.close()
    files.close()
    assert files.write(1, "b") == "b"
    unopened = MemoryFiles.create(1)
    unopened.close()
    assert not Path(unopened.paths[0]).exists()


FAULTS = """
import resource
import numpy as np
from fedapps.engines.memory_files import keep_freed_memory

def faults():
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            np.ones(200_000), np.ones(400_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given = faults()
keep_freed_memory()
print(given, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc")
def test_freed_memory_is_kept_for_the_next_arrays():
    """Ten times arrays of 1.6 and 3.2 MB, in pages of 4 KB: 11 720 that have to be zeroed."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # else glibc learns it, sooner or later
    printed = subprocess.check_output([sys.executable, "-c", FAULTS], env=env)
    given, kept = map(int, printed.split())
    assert given > 10_000
    assert kept < 1_000
