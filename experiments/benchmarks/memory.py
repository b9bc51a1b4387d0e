"""100 of 100 000 registered clients in a round, beside 100 of 1 000: processor time and memory.

All clients of both have 20 samples of one dataset, 2.2 million random images of 8×8. Memory is the
highest proportional set size (Linux), in which a page that processes share counts once."""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil

import partitions
from experiments.benchmarks.measure import NEVER, Row, in_new_process, proportional_memory, train
from fedapps.engines.job_pool import Job
from fedapps.settings.config import Config, defaults

REGISTERED, SAMPLED, SAMPLES, ROUNDS = (1000, 100_000), 100, 20, 40
IMAGES = 2_200_000  # a tenth more than are needed: the rule gives no row twice
ENGINES, LIMIT = ("in-process", "ray"), "1.20"


def protocol(file: Path, registered: int) -> Config:
    """FedAvg with an MLP, 5 steps of 4 samples on clients with 20 samples each."""
    share = SAMPLED / registered
    chosen: Config = {"dataset": str(file), "partition": "step", "num-clients": registered}
    size: Config = {"partition.samples-per-client": SAMPLES, "train-fraction": 1.0}
    turn: Config = {"local-steps": 5, "batch-size": 4, "rounds": ROUNDS, "checkpoint-every": 0}
    sampled: Config = {"fraction-train": share, "fraction-evaluate": share}
    return defaults() | chosen | size | turn | sampled | {"evaluate-every": NEVER}


@contextmanager
def dataset() -> Iterator[Path]:
    """A file of random images, and a cache of its own for all processes."""
    generator, before = np.random.default_rng(0), os.environ.get("FEDAPPS_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.npz"
        x = generator.integers(0, 256, (IMAGES, 1, 8, 8), dtype=np.uint8)
        np.savez(file, x=x, y=np.arange(IMAGES) % 10)
        os.environ["FEDAPPS_CACHE_DIR"] = folder
        try:
            yield file
        finally:
            del os.environ["FEDAPPS_CACHE_DIR"]
            if before is not None:
                os.environ["FEDAPPS_CACHE_DIR"] = before


def partition(config: Config) -> None:
    """Partition the dataset; the cache keeps the result for the processes that are measured."""
    partitions.federation(config)


class Watch:
    """Looks at a run's processes several times a second, and at how many rounds are over.

    `memory` gives that of a process in MB."""

    def __init__(self, memory: Callable[[int], int] = proportional_memory) -> None:
        self._memory = memory
        self._server, self._looking = psutil.Process(), 0.0
        self._peaks = Counter[psutil.Process]()
        self._seconds: dict[int, float] = {}  # of all processes, by the rounds that were over

    def look(self, jobs: list[Job]) -> None:
        """Note the memory and the processor time of now."""
        if not jobs:  # the run has not begun
            return
        started, used = time.thread_time(), 0.0
        for process in (self._server, *self._server.children(recursive=True)):
            with suppress(psutil.Error, OSError, LookupError):  # the process has ended
                if process == self._server or process.name().startswith("ray::Actor"):
                    memory = self._memory(process.pid)
                    self._peaks[process] = max(self._peaks[process], memory)
                    used += sum(process.cpu_times()[:2])
        with suppress(OSError):
            rounds = len((jobs[0].folder / "metrics.jsonl").read_text().splitlines())
            self._seconds.setdefault(rounds, used - self._looking)
        self._looking += time.thread_time() - started

    def peaks(self) -> tuple[int, int]:
        """Peak memory in MB of the server's process, and of the larger actor, 0 without one."""
        return self._peaks.pop(self._server), max(self._peaks.values(), default=0)

    def seconds(self) -> float:
        """Processor seconds of a round, from the third to the last but one, of all processes."""
        (first, start), *_, (last, end) = sorted(
            (n, used) for n, used in self._seconds.items() if 2 <= n < ROUNDS
        )
        return (end - start) / (last - first)


def measure(engine: str, config: Config) -> tuple[float, int, int]:
    """Processor seconds of a round of one run, and the memory of the server and of an actor."""
    watch = Watch()
    train(config, engine, watch.look)
    return watch.seconds(), *watch.peaks()


def rows() -> list[Row]:
    """Most clients registered over fewest, on each engine."""
    table, names = [], ("processor time of a round", "server's memory", "memory of an actor")
    with dataset() as file:
        configs = [protocol(file, registered) for registered in REGISTERED]
        for config in configs:
            in_new_process(partition, config)
        for engine in ENGINES:
            few, many = (in_new_process(partial(measure, engine), config) for config in configs)
            for name, unit, one, other in zip(names, ("s", "MB", "MB"), many, few, strict=True):
                if other:
                    what = f"{name} {engine}, {REGISTERED[1]} registered / {REGISTERED[0]}"
                    table.append(Row(what, one / other, LIMIT, f"{one:.4g} / {other:.4g} {unit}"))
    return table
