"""The engine that is chosen without ``--engine``, and the seconds of the same runs on both: ten
federations of short and of long turns, one run and six.

Each run is made in a new process. Measure on a machine that does nothing else:

    python -m experiments.benchmarks choice"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from experiments.benchmarks.measure import NEVER, Row, in_new_process, seconds
from fedapps.common.resources import num_cpus
from fedapps.engine_choice import MAX_PROCESSES, Choice, choose_engine
from fedapps.engines.jobs import Job
from fedapps.engines.run import run_jobs
from fedapps.planning import make_jobs
from fedapps.serverapp import APPS
from fedapps.settings.config import Config, defaults


class Federation(NamedTuple):
    """Runs of these methods, with so many seeds each."""

    name: str
    methods: tuple[str, ...]
    seeds: int
    changes: Config


DIGITS: Config = {"dataset": "digits", "num-clients": 20}
MNIST: Config = {"dataset": "mnist", "num-clients": 100}
CONVNET: Config = {"dataset": "mnist", "num-clients": 20, "model": "convnet"}
FEDERATIONS = (
    Federation("digits, 30 rounds", ("fedavg",), 1, DIGITS | {"rounds": 30}),
    Federation("digits, 300 rounds", ("fedavg",), 1, DIGITS | {"rounds": 300}),
    Federation("digits, 30 rounds, 6 runs", ("fedavg", "fedper"), 3, DIGITS | {"rounds": 30}),
    Federation("mnist, 5 rounds", ("fedavg",), 1, MNIST | {"rounds": 5}),
    Federation("mnist, 60 rounds", ("fedavg",), 1, MNIST | {"rounds": 60}),
    Federation("mnist, 20 rounds, 6 runs", ("fedavg", "fedper"), 3, MNIST | {"rounds": 20}),
    Federation("mnist, fedtta, 20 rounds", ("fedtta",), 1, MNIST | {"rounds": 20}),
    Federation("mnist, convnet, 10 rounds", ("fedavg",), 1, CONVNET | {"rounds": 10}),
    Federation("mnist, convnet, 4 rounds, 6 runs", ("fedavg",), 6, CONVNET | {"rounds": 4}),
    # Of two clients one trains: the other cores have nothing to do.
    Federation("mnist, convnet, 2 clients", ("fedavg",), 1,
               CONVNET | {"num-clients": 2, "rounds": 40}),
)  # fmt: skip


def protocol(federation: Federation) -> Config:
    """The configuration of a federation, evaluated after its last round."""
    return defaults() | {"evaluate-every": NEVER, "checkpoint-every": 0} | federation.changes


def jobs_of(federation: Federation, config: Config, folder: str) -> list[Job]:
    """The federation's runs."""
    return make_jobs(config, list(federation.methods), list(range(federation.seeds)), Path(folder))


def chosen(federation: Federation, config: Config) -> Choice:
    """The engine that `fedapps run` would choose."""
    with tempfile.TemporaryDirectory() as folder:
        return choose_engine(jobs_of(federation, config, folder), None, ray=False, measured={})


def took(federation: Federation, engine: str, parallel: int, config: Config) -> float:
    """Seconds of the runs on an engine. Raises RuntimeError if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = jobs_of(federation, config, folder)
        whole = seconds(
            partial(run_jobs, jobs, engine, APPS, parallel=parallel, follow=lambda _: None)
        )
        for job in jobs:
            if job.error:
                raise RuntimeError(job.error)
        return whole


def rows() -> Iterator[Row]:
    """The seconds on the chosen engine over those on the other one; how many choices are right."""
    right = 0
    for federation in FEDERATIONS:
        config = protocol(federation)
        choice = in_new_process(partial(chosen, federation), config)
        side_by_side = choice.parallel
        if choice.engine == "ray":
            runs = len(federation.methods) * federation.seeds
            side_by_side = min(runs, num_cpus(), MAX_PROCESSES)
        parallel = {"in-process": side_by_side, "ray": 1}
        times = {}
        for engine, count in parallel.items():
            times[engine] = in_new_process(partial(took, federation, engine, count), config)
        other = "ray" if choice.engine == "in-process" else "in-process"
        is_right = times[choice.engine] <= times[other]
        right += is_right
        values = (
            f"{times[choice.engine]:.1f} / {times[other]:.1f} s: {choice.engine}, "
            f"{'right' if is_right else 'wrong'}"
        )
        ratio = times[choice.engine] / times[other]
        yield Row(f"chosen engine / other, {federation.name}", ratio, "1.00", values)
    count = len(FEDERATIONS)
    values = f"{right} of {count}, aim ≥ {0.9 * count:g}"
    yield Row("choices of the faster engine", right / count, "", values)
