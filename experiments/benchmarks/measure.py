"""Tools of the benchmarks: a row of the table, clocks, runs, runs in new processes."""

import logging
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.engines.jobs import Job
from fedapps.engines.run import run_jobs
from fedapps.planning import make_jobs
from fedapps.serverapp import APPS, run
from fedapps.settings.config import Config

NEVER = 10**6  # `evaluate-every` of a run that is evaluated after its last round only
T = TypeVar("T")


class Row(NamedTuple):
    """A row of the table; `values` are the two numbers behind the ratio, with their unit."""

    what: str
    ratio: float
    limit: str
    values: str


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(
    what: str,
    limit: str,
    first: Callable[[], float],
    second: Callable[[], float],
    *,
    repeats: int,
    unit: str = " a round",
) -> Row:
    """The ratio of two times that are measured in turn; medians over the repeats."""
    pairs = np.array([(first(), second()) for _ in range(repeats)])
    one, other = np.median(pairs, axis=0)
    ratio = float(np.median(pairs[:, 0] / pairs[:, 1]))
    return Row(what, ratio, limit, f"{one:.2f} / {other:.2f}{unit}")


def train(
    config: Config, engine: str = "in-process", follow: Callable[[list[Job]], None] = lambda _: None
) -> list[dict[str, Any]]:
    """The reports of a run's rounds. Raises RuntimeError if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = make_jobs(config, [str(config["method"])], [0], Path(folder))
        run_jobs(jobs, engine, APPS, follow=follow)
        if jobs[0].error:
            raise RuntimeError(jobs[0].error)
        return jobs[0].news()


def round_seconds(report: Mapping[str, Any]) -> float:
    """Seconds of a round without its evaluation."""
    return sum(took for phase, took in report["phases"].items() if phase != "evaluate")


def process_sizes(file: str, pid: int) -> dict[str, int]:
    """The sizes in kB in one of a process's files below /proc, by name."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}


def proportional_memory(pid: int) -> int:
    """A process's proportional set size in MB (Linux)."""
    return process_sizes("smaps_rollup", pid)["Pss"] // 1024


def in_new_process(work: Callable[[Config], T], config: Config) -> T:
    """The result of `work` in a process of its own, with one thread; its error if it fails."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_quiet) as pool:
        return pool.submit(work, config).result()


def _quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)


class TimedGrid(InProcessGrid):
    """Adds up the clients' seconds by type of message."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seconds: dict[str, float] = defaultdict(float)

    def _deliver(self, message: Any) -> Any:
        started = time.perf_counter()
        try:
            return super()._deliver(message)
        finally:
            self.seconds[message.metadata.message_type] += time.perf_counter() - started


def time_rounds(config: Config, method: str, count: int) -> tuple[float, dict[str, float]]:
    """Seconds of one of `count` rounds, and the clients' part of them by type of message.

    The difference of two runs, which excludes the start and the last evaluation."""
    runs = []
    for rounds in (1, 1 + count):
        grid = TimedGrid.simulation(app, config, int(config["num-clients"]))
        changes = {"method": method, "rounds": rounds}
        took = seconds(lambda g=grid, c=config | changes: run(g, c, "in-process"))  # type: ignore[misc]
        runs.append((took, grid.seconds))
    (first, before), (last, after) = runs
    clients = {action: (took - before[action]) / count for action, took in after.items()}
    return (last - first) / count, clients
