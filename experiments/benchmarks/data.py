"""What data cost a process: time from its start to its first mini-batch, and memory.

Memory is that of four processes that each serve all clients of CIFAR-100 (random images of
its size), as Ray's actors do: the sum of proportional set sizes (Linux), in which a page that
processes share counts once."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import partitions
from experiments.benchmarks.measure import Row, proportional_memory
from fedapps.settings.config import Config, defaults
from partitions.cache import cached
from partitions.datasets.catalog import DATASETS
from partitions.datasets.loading import folder_key
from partitions.datasets.readers.raw import Raw

CLIENTS, ACTORS, IMAGES, REPEATS = 100, 4, 60_000, 3
LIMIT = 1500  # MB of the four processes together

FIRST_BATCH = f"""
import fedapps.clientapp, partitions
from fedapps.settings.config import defaults
federation = partitions.federation(defaults() | {{"dataset": "mnist", "num-clients": {CLIENTS}}})
train = federation.share(0).train
train[list(range(min(64, len(train))))]
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def run_program(cache: str, program: str = FIRST_BATCH) -> tuple[float, float]:
    """Seconds of a process that runs the program, and the peak memory in MB that it prints."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"FEDAPPS_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - started, float(done.stdout or 0) / 1024


def start() -> list[Row]:
    """The first start, which converts and partitions the files, and later ones, over torch's."""
    with tempfile.TemporaryDirectory() as cache:
        first, peak = run_program(cache)
        later = [run_program(cache) for _ in range(REPEATS)]
    base = float(np.median([run_program("", "import torch")[0] for _ in range(REPEATS)]))
    took, memory = np.median(later, axis=0)
    what = "start to first batch, MNIST, 100 clients"
    return [
        Row(f"{what}, first / import torch", first / base, "", f"{first:.1f} / {base:.1f}"),
        Row(f"{what}, later / import torch", took / base, "", f"{took:.1f} / {base:.1f}"),
        Row("its peak memory, first / later", peak / memory, "", f"{peak:.0f} / {memory:.0f} MB"),
    ]


def protocol(root: str) -> Config:
    """CIFAR-100 among 100 clients."""
    chosen: Config = {"dataset": "cifar100", "data-dir": root, "partition.classes-per-client": 10}
    return defaults() | chosen | {"num-clients": CLIENTS}


def store_images(root: str) -> None:
    """Put random images of CIFAR-100's size where the converted files are looked for."""
    folder = Path(root) / "cifar100"
    folder.mkdir()
    (folder / "random").touch()
    x = np.random.default_rng(0).integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8)
    coarse = np.array([f"superclass {i % 20}" for i in range(IMAGES)])
    raw = Raw(x, np.arange(IMAGES) % 100, IMAGES * 5 // 6, {"coarse": coarse})
    cached(folder_key(DATASETS["cifar100"], "cifar100", folder), lambda: raw)


def serve(root: str) -> None:
    """The program of one process: serve every client once, and print the memory before and after.

    Each time it prints a line, then waits for one, then prints its memory, then waits again."""
    import fedapps.clientapp  # noqa: F401

    def report() -> None:
        print("ready", flush=True)
        input()
        print(proportional_memory(os.getpid()), flush=True)
        input()

    torch.set_num_threads(1)
    report()
    federation = partitions.federation(protocol(root))
    for client in range(CLIENTS):
        samples = federation.share(client).everything
        for rows in torch.arange(len(samples)).split(64):
            samples[rows]
    report()


class Actor(subprocess.Popen[str]):
    """A process that runs `serve`."""

    def __init__(self, root: str) -> None:
        program = f"from experiments.benchmarks.data import serve; serve({root!r})"
        command = [sys.executable, "-c", program]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> str:
        """The next line."""
        assert self.stdout is not None
        line = self.stdout.readline()
        if not line:
            raise RuntimeError("a process ended early; its error stands above")
        return line

    def resume(self) -> None:
        """Let it continue."""
        print(file=self.stdin, flush=True)


def total_memory(actors: list[Actor]) -> float:
    """The actors' memory, summed, when all are at the same point; then they continue."""
    for actor in actors:
        actor.read()
    for actor in actors:
        actor.resume()
    total = sum(float(actor.read()) for actor in actors)
    for actor in actors:
        actor.resume()
    return total


def memory() -> list[Row]:
    """Memory of four processes with all clients of CIFAR-100, over that without data."""
    with tempfile.TemporaryDirectory() as root:
        os.environ["FEDAPPS_CACHE_DIR"] = root
        try:
            store_images(root)
            for count in (1, ACTORS):  # the first one alone partitions, as a run's server does
                actors = [Actor(root) for _ in range(count)]
                empty, whole = total_memory(actors), total_memory(actors)
                for actor in actors:
                    actor.wait()
        finally:
            del os.environ["FEDAPPS_CACHE_DIR"]
    what = f"memory of {ACTORS} processes, CIFAR-100, {CLIENTS} clients / without data"
    return [Row(what, whole / empty, f"{LIMIT / empty:.2f}", f"{whole:.0f} / {empty:.0f} MB")]
