"""What data cost a process: ``python -m experiments.bench_data``. Needs MNIST (FEDAPPS_DATA_DIR).

Time from the process's start to its first mini-batch, and the memory of four processes that each
serve all clients of CIFAR-100 (random images of its size), as Ray's actors do. A page that
processes share counts once: the sum is that of proportional set sizes (Linux)."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedapps.settings.config import Config, defaults

CLIENTS, ACTORS, IMAGES, REPEATS = 100, 4, 60_000, 3
LIMIT = 1500  # MB of the four processes together
Rows = list[tuple[str, float, str, str]]  # what, ratio, bar, seconds or MB

FIRST_BATCH = f"""
import fedapps.clientapp, partitions
from fedapps.settings.config import defaults
federation = partitions.federation(defaults() | {{"dataset": "mnist", "num-clients": {CLIENTS}}})
train = federation.share(0).train
train[list(range(min(64, len(train))))]
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def first_batch(cache: str, program: str = FIRST_BATCH) -> tuple[float, float]:
    """Seconds from a process's start to its first batch of MNIST, and its peak memory in MB."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"FEDAPPS_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - started, float(done.stdout or 0) / 1024


def start() -> Rows:
    """The first start, which converts the files and deals them, and later ones, over torch's."""
    with tempfile.TemporaryDirectory() as cache:
        first, peak = first_batch(cache)
        later = [first_batch(cache) for _ in range(REPEATS)]
    torch = float(np.median([first_batch("", "import torch")[0] for _ in range(REPEATS)]))
    seconds, memory = np.median(later, axis=0)
    what = "start to first batch, MNIST, 100 clients"
    return [
        (f"{what}, first / import torch", first / torch, "", f"{first:.1f} / {torch:.1f}"),
        (f"{what}, later / import torch", seconds / torch, "", f"{seconds:.1f} / {torch:.1f}"),
        ("its peak memory, first / later", peak / memory, "", f"{peak:.0f} / {memory:.0f} MB"),
    ]


def protocol(root: str) -> Config:
    """CIFAR-100 dealt to 100 clients."""
    chosen: Config = {"dataset": "cifar100", "data-dir": root, "partition.classes-per-client": 10}
    return defaults() | chosen | {"num-clients": CLIENTS}


def _keep_cifar100(root: str) -> None:
    """Put random images of CIFAR-100's size where `load` looks for its converted files."""
    from partitions.cache import cached, fingerprint
    from partitions.readers.raw import Raw

    folder = Path(root) / "cifar100"
    folder.mkdir()
    (folder / "random").touch()
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8)
    coarse = np.array([f"superclass {i % 20}" for i in range(IMAGES)])
    raw = Raw(x, np.arange(IMAGES) % 100, IMAGES * 5 // 6, {"coarse": coarse})
    cached(f"cifar100-{fingerprint(folder)}", lambda: raw)


def _resident() -> float:
    """This process's proportional set size in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def serve(root: str) -> None:
    """Serve every client once, as an actor of the simulation engine in the course of a run.

    Tells its memory before and after; at either point it waits for the others."""
    import torch

    import fedapps.clientapp  # noqa: F401
    import partitions

    def tell() -> None:
        print("here", flush=True)
        input()
        print(_resident(), flush=True)
        input()

    torch.set_num_threads(1)
    tell()
    federation = partitions.federation(protocol(root))
    for client in range(CLIENTS):
        samples = federation.share(client).everything
        for rows in torch.arange(len(samples)).split(64):
            samples[rows]
    tell()


def _told(actors: "list[subprocess.Popen[str]]") -> float:
    """The actors' memory, summed, when all are at the same point; then they go on."""
    for actor in actors:
        assert actor.stdout is not None
        if not actor.stdout.readline():
            raise RuntimeError("a process ended early; its error stands above")
    for actor in actors:
        print(file=actor.stdin, flush=True)
    told = 0.0
    for actor in actors:
        assert actor.stdout is not None
        told += float(actor.stdout.readline())
    for actor in actors:
        print(file=actor.stdin, flush=True)
    return told


def memory() -> Rows:
    """Memory of four processes with all clients of CIFAR-100, over that without data."""
    with tempfile.TemporaryDirectory() as root:
        os.environ["FEDAPPS_CACHE_DIR"] = root
        program = f"from experiments.bench_data import serve; serve({root!r})"
        try:
            _keep_cifar100(root)
            for count in (1, ACTORS):  # first one alone, which deals, as a run's server does
                actors = [
                    subprocess.Popen(
                        [sys.executable, "-c", program],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                    for _ in range(count)
                ]
                empty, whole = _told(actors), _told(actors)
                for actor in actors:
                    actor.wait()
        finally:
            del os.environ["FEDAPPS_CACHE_DIR"]
    what = f"memory of {ACTORS} processes, CIFAR-100, {CLIENTS} clients / without data"
    bar = f"{LIMIT / empty:.2f}"  # so that they stay below LIMIT
    return [(what, whole / empty, bar, f"{whole:.0f} / {empty:.0f} MB")]


def rows() -> Rows:
    """The benchmark table's rows."""
    return start() + memory()


if __name__ == "__main__":
    for row in rows():
        print(*row, sep="  ")
