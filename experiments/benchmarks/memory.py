"""Processor time and memory of rounds with 100 of 100 000 registered clients, over 100 of 1 000.

Every client has 20 samples of one dataset, 2.2 million random images of 8×8. Memory is the highest
proportional set size (Linux), in which a page that processes share counts once."""

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
from fedapps.engines.jobs import Job
from fedapps.settings.config import Config, defaults

REGISTERED = (1000, 100_000)
SAMPLED = 100
SAMPLES = 20
ROUNDS = 40
IMAGES = 2_200_000  # a tenth more than needed, since the rule uses no row twice
ENGINES = ("in-process", "ray")
LIMIT = "1.20"


def protocol(file: Path, registered: int) -> Config:
    """FedAvg with an MLP, 5 steps of 4 samples on clients with 20 samples each."""
    chosen: Config = {
        "dataset": str(file),
        "partition": "step",
        "num-clients": registered,
        "partition.samples-per-client": SAMPLES,
        "train-fraction": 1.0,
        "fraction-train": SAMPLED / registered,
        "fraction-evaluate": SAMPLED / registered,
        "local-steps": 5,
        "batch-size": 4,
        "rounds": ROUNDS,
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

    def seconds(self) -> float:
        """Processor seconds of a round of all processes, without the first two rounds and the
        last one."""
        # The start and the end of a run take time that belongs to no round.
        between = [rounds for rounds in self._seconds if 2 <= rounds < ROUNDS]
        first = min(between)
        last = max(between)
        return (self._seconds[last] - self._seconds[first]) / (last - first)


def measure(engine: str, config: Config) -> tuple[float, int, int]:
    """Processor seconds of a round of one run, and the memory of the server and of an actor."""
    watch = Watch()
    train(config, engine, watch.look)
    return watch.seconds(), *watch.peaks()


def rows() -> list[Row]:
    """Most clients registered over fewest, on each engine."""
    quantities = (
        ("processor time of a round", "s"),
        ("server's memory", "MB"),
        ("memory of an actor", "MB"),
    )
    table = []
    with dataset() as file:
        configs = [protocol(file, registered) for registered in REGISTERED]
        for config in configs:
            in_new_process(partition, config)
        for engine in ENGINES:
            # Each in a process of its own: memory that one run frees would serve the next one.
            few, many = [in_new_process(partial(measure, engine), config) for config in configs]
            for (name, unit), value_few, value_many in zip(quantities, few, many, strict=True):
                if not value_few:  # in process there is no actor
                    continue
                what = f"{name} {engine}, {REGISTERED[1]} registered / {REGISTERED[0]}"
                values = f"{value_many:.4g} / {value_few:.4g} {unit}"
                table.append(Row(what, value_many / value_few, LIMIT, values))
    return table
