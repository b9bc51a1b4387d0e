"""Processor time and memory of rounds with 1000 of a million registered clients, over 1000 of 1000.

On Ray it is 100 of 100 000, over 100 of 1000. Every client has samples of one dataset, 2.2 million
random images of 8×8: 2, and 20 on Ray. Memory is the highest proportional set size (Linux), in
which a page that processes share counts once."""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

import partitions
from experiments.benchmarks.measure import NEVER, Row, in_new_process, proportional_memory, train
from fedapps.engines.jobs import Job
from fedapps.settings.config import Config, defaults

IMAGES = 2_200_000  # a tenth more than needed, since the rule uses no row twice


class Size(NamedTuple):
    """How many clients are registered, how many of them take part in a round, and so on."""

    registered: tuple[int, int]
    sampled: int
    samples: int  # of a client
    rounds: int
    limit: str


# A million nodes answer the opening query one after the other: on Ray that would take an hour.
SIZES = {
    "in-process": Size((1000, 1_000_000), sampled=1000, samples=2, rounds=8, limit="1.30"),
    "ray": Size((1000, 100_000), sampled=100, samples=20, rounds=40, limit="1.20"),
}


def protocol(file: Path, size: Size, registered: int) -> Config:
    """FedAvg with an MLP, 5 steps of 4 samples, or of as many as a client has."""
    chosen: Config = {
        "dataset": str(file),
        "partition": "step",
        "num-clients": registered,
        "partition.samples-per-client": size.samples,
        "train-fraction": 1.0,
        "fraction-train": size.sampled / registered,
        "fraction-evaluate": size.sampled / registered,
        "local-steps": 5,
        "batch-size": 4,
        "rounds": size.rounds,
        "checkpoint-every": 0,
        "evaluate-every": NEVER,
    }
    return defaults() | chosen


@contextmanager
def dataset() -> Iterator[Path]:
    """A file of random images, and a cache of its own for all processes."""
    generator = np.random.default_rng(0)
    before = os.environ.get("FEDAPPS_CACHE_DIR")
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
    """Records the memory and the processor time of a run's processes several times a second.

    `memory` returns the memory of a process in MB."""

    def __init__(self, memory: Callable[[int], int] = proportional_memory) -> None:
        self._memory = memory
        self._server = psutil.Process()
        self._watching = 0.0  # processor seconds of this class itself, which are subtracted
        self._peaks = Counter[psutil.Process]()
        # Processor seconds of all processes at the first look after n finished rounds, by n.
        self._seconds: dict[int, float] = {}

    def look(self, jobs: list[Job]) -> None:
        """Record the present memory and processor time."""
        if not jobs:  # the run has not begun
            return
        started = time.thread_time()
        used = 0.0
        for process in (self._server, *self._server.children(recursive=True)):
            with suppress(psutil.Error, OSError, LookupError):  # the process has ended
                if process == self._server or process.name().startswith("ray::Actor"):
                    memory = self._memory(process.pid)
                    self._peaks[process] = max(self._peaks[process], memory)
                    used += sum(process.cpu_times()[:2])
        with suppress(OSError):
            rounds = len((jobs[0].folder / "metrics.jsonl").read_text().splitlines())
            self._seconds.setdefault(rounds, used - self._watching)
        self._watching += time.thread_time() - started

    def peaks(self) -> tuple[int, int]:
        """Peak memory in MB of the server's process, and of the larger actor, 0 without one."""
        return self._peaks.pop(self._server), max(self._peaks.values(), default=0)

    def seconds(self, num_rounds: int) -> float:
        """Processor seconds of a round of all processes, without the first two of `num_rounds` and
        the last one."""
        # The start and the end of a run take time that belongs to no round.
        between = [rounds for rounds in self._seconds if 2 <= rounds < num_rounds]
        first = min(between)
        last = max(between)
        return (self._seconds[last] - self._seconds[first]) / (last - first)


def measure(engine: str, config: Config) -> tuple[float, int, int]:
    """Processor seconds of a round of one run, and the memory of the server and of an actor."""
    watch = Watch()
    train(config, engine, watch.look)
    return watch.seconds(int(config["rounds"])), *watch.peaks()


def rows() -> list[Row]:
    """Most clients registered over fewest, on each engine."""
    quantities = (
        ("processor time of a round", "s"),
        ("server's memory", "MB"),
        ("memory of an actor", "MB"),
    )
    table = []
    with dataset() as file:
        for engine, size in SIZES.items():
            configs = [protocol(file, size, registered) for registered in size.registered]
            for config in configs:
                in_new_process(partition, config)
            # Each in a process of its own: memory that one run frees would serve the next one.
            few, many = [in_new_process(partial(measure, engine), config) for config in configs]
            for (name, unit), value_few, value_many in zip(quantities, few, many, strict=True):
                if not value_few:  # in process there is no actor
                    continue
                least, most = size.registered
                what = f"{name} {engine}, {most} registered / {least}"
                values = f"{value_many:.4g} / {value_few:.4g} {unit}"
                table.append(Row(what, value_many / value_few, size.limit, values))
    return table
