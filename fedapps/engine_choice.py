"""The engine of runs for which the user names none: the one whose estimated time is shorter.

In process, whole runs go side by side, one on each core; on Ray, a run's clients do. Ray pays where
a client's turn is long and there are fewer runs than cores.

Other work on the machine takes its share of the cores, and processes side by side lose more by it
than a single one: beside one busy process, two of ours on two cores are 1.33 times as fast as one,
not twice."""

import math
import os
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import psutil

from fedapps.common.errors import error_line
from fedapps.common.resources import num_cpus
from fedapps.engines.jobs import Job, trains_in_cohorts
from fedapps.estimate import Cost, Measured, cost, trained_by, training_seconds

MAX_PROCESSES = 8  # if not set by the user: each process holds torch and the data in memory

# Measured on two cores, see "Ray and Flower's engine" in docs/results/speed.md.
WORKER_START = 5.0  # seconds until a process has imported torch and takes its first run
RAY_START = 8.0  # seconds that a run on Ray begins later, and its actors end later
RAY_TURN = 0.00125  # seconds for each turn, one after the other, in the server's process
RAY_ROUND = 1.15  # a round on Ray over the same turns in loops side by side

WATCH_SECONDS = 0.5  # for which other processes are watched at least


class Choice(NamedTuple):
    """An engine, the number of runs side by side, and why."""

    engine: str
    parallel: int
    reason: str = ""

    @property
    def line(self) -> str:
        """What the user reads."""
        return f"engine: {self.engine}, since {self.reason}"


class Clock(NamedTuple):
    """The time, and the processor seconds that all processes and this one have used until then."""

    time: float
    all: float
    own: float

    @classmethod
    def now(cls) -> Self:
        """These seconds now."""
        used = psutil.cpu_times()
        nice = getattr(used, "nice", 0.0)  # of low priority; Windows has none
        return cls(time.monotonic(), used.user + used.system + nice, time.process_time())


class Machine(NamedTuple):
    """A machine's processors, and how many of its processes are busy beside ours.

    The load average of the system is no measure of that: it holds what ended a minute ago, such as
    the last run."""

    processors: int
    load: float

    @classmethod
    def watched_since(cls, start: Clock) -> Self:
        """This machine, with its other processes' load since `start`, or for longer if that is
        less than `WATCH_SECONDS` ago."""
        time.sleep(max(0.0, start.time + WATCH_SECONDS - time.monotonic()))
        end = Clock.now()
        others = (end.all - start.all) - (end.own - start.own)
        return cls(os.cpu_count() or 1, max(0.0, others / (end.time - start.time)))

    def share(self, processes: int) -> float:
        """The part of a processor that each of so many processes of ours gets."""
        return min(1.0, self.processors / (processes + self.load))

    def slowdown(self, processes: int) -> float:
        """By how much each of so many processes is slower than one alone, as which a turn was
        measured."""
        return self.share(1) / self.share(processes)


def choose_engine(
    jobs: Sequence[Job], parallel: int | None, *, ray: bool, measured: Measured
) -> Choice:
    """The faster engine for the unfinished `jobs`, by the measured seconds of a client's turn.

    `parallel` is the number of runs side by side that the user set. `ray`: options need Ray.
    `measured` as in `estimate.cost`."""
    cores = num_cpus()
    unfinished = [job for job in jobs if not job.done]
    side_by_side = parallel or max(1, min(len(unfinished), cores, MAX_PROCESSES))
    if ray:
        return Choice("ray", parallel or 1)
    if not unfinished:
        return Choice("in-process", side_by_side)
    if trains_in_cohorts(unfinished):
        return Choice("in-process", side_by_side, "stacked-clients trains in one process")
    if parallel is not None and parallel > 1:
        return Choice("in-process", side_by_side, f"--jobs asks for {parallel} at a time")
    if cores == 1:
        return Choice("in-process", side_by_side, "Ray needs several")
    start = Clock.now()
    try:
        costs = _costs(unfinished, measured)
    except Exception as error:  # of the user's model or data: the run itself reports it in full
        reason = f"a client's turn could not be measured: {error_line(error)}"
        return Choice("in-process", side_by_side, reason)
    machine = Machine.watched_since(start)
    in_process = seconds_in_process(costs, side_by_side, machine)
    on_ray = seconds_on_ray(costs, cores, machine)
    turn = sum(c.seconds for c in costs) / sum(c.turns for c in costs)
    runs = "1 run takes" if len(costs) == 1 else f"{len(costs)} runs take"
    work = f"a client's turn takes {_short(turn)}: on {cores} cores {runs}"
    if on_ray < in_process:
        return Choice("ray", 1, f"{work} {_about(on_ray)}, in-process {_about(in_process)}")
    times = f"{_about(in_process)}, on ray {_about(on_ray)}"
    return Choice("in-process", side_by_side, f"{work} {times}")


def _costs(jobs: Sequence[Job], measured: Measured) -> list[Cost]:
    """The cost of each job, without the training that another one does for it."""
    trainers = trained_by(jobs)
    costs = []
    for job in jobs:
        whole = cost(job, measured)
        if job.name in trainers:
            rest = whole.seconds - training_seconds(job, measured)
            whole = whole._replace(seconds=max(0.0, rest))
        costs.append(whole)
    return costs


def seconds_in_process(costs: Sequence[Cost], parallel: int, machine: Machine) -> float:
    """Seconds of runs that `parallel` processes take one after the other, longest first."""
    free_at = [0.0] * parallel
    for seconds in sorted((c.seconds for c in costs), reverse=True):
        first = free_at.index(min(free_at))
        free_at[first] += seconds
    working = min(parallel, len(costs))
    start = WORKER_START if parallel > 1 else 0.0  # one run after the other stays in this process
    return start / machine.share(working) + max(free_at) * machine.slowdown(working)


def seconds_on_ray(costs: Sequence[Cost], cores: int, machine: Machine) -> float:
    """Seconds of runs that go one after the other, with clients side by side."""
    total = RAY_START / machine.share(cores)
    for c in costs:
        # The last batch of a round leaves cores idle.
        batches = math.ceil(c.clients / cores)
        speedup = c.clients / batches / machine.slowdown(min(c.clients, cores))
        total += c.seconds / speedup * RAY_ROUND + c.turns * RAY_TURN
    return total


def _about(seconds: float) -> str:
    return f"about {_short(seconds)}"


def _short(seconds: float) -> str:
    """A time in a unit that fits: 12.3 ms, 14 s, 37 min."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
