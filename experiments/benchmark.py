"""Speed and memory, as ratios measured in one run: ``python -m experiments.benchmark [NAME …]``.

FedAvg, in process and on Ray, and pFedHN over hand-written loops of the same steps on the same data
with one thread each; FedTTA's step and ODPFL-HN's round over FedAvg's; FedEmbed with many users;
start and memory of the data; rounds among 10 000 registered clients; cohorts; other simulators.
Ratios hold on any machine. Needs MNIST (FEDAPPS_DATA_DIR)."""

import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import partitions
from clients.models import build_model
from clients.sgd import batches
from experiments import (
    bench_clients,
    bench_cohort,
    bench_data,
    bench_fedembed,
    bench_fedtta,
    bench_odpfl,
    bench_peers,
    bench_pfedhn,
    by_hand,
)
from fedapps.engines.jobs import make_jobs
from fedapps.engines.run import run_jobs
from fedapps.serverapp import APPS
from fedapps.settings.config import Config, defaults

ROUNDS, REPEATS = 4, 5
Rows = list[tuple[str, float, str, str]]  # what, ratio, bar, in seconds


def protocol() -> Config:
    """FedTTA's protocol on MNIST: 100 clients, half of them training, all of those each round."""
    return defaults() | {
        "dataset": "mnist",
        "num-clients": 100,
        "rounds": ROUNDS,
        "evaluate-every": 10**6,
    }


def hand_written(config: Config, rounds: int, share: slice = slice(None)) -> None:
    """FedAvg by hand, the same steps on the same data."""
    torch.set_num_threads(1)
    federation = partitions.federation(config)
    clients = [i for i in range(federation.num_clients) if not federation.novel[i]][share]
    data = [federation.share(i).train[:] for i in clients]
    model = build_model(str(config["model"]), federation.info.shape, 10, 0)
    generator = torch.Generator().manual_seed(0)

    steps, size = int(config["local-steps"]), int(config["batch-size"])

    def rows(n: int) -> Sequence[torch.Tensor]:
        return batches(n, size, steps=steps, epochs=0, generator=generator)

    for _ in by_hand.rounds(model, lambda: data, rows, float(config["lr"]), rounds):
        pass


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_process() -> Rows:
    """A round on the in-process grid over one of the hand-written loop; medians of alternating
    runs. What the start and the evaluation cost falls out."""
    config = protocol()
    hand_written(config, 1)
    pairs = [
        (
            bench_odpfl.rounds(config, "fedavg", ROUNDS)[0] / ROUNDS,
            seconds(lambda: hand_written(config, ROUNDS)) / ROUNDS,
        )
        for _ in range(REPEATS)
    ]
    ratio = float(np.median([ours / loop for ours, loop in pairs]))
    ours, loop = np.median(np.array(pairs), axis=0)
    took = f"{ours:.2f} / {loop:.2f} a round"
    return [("FedAvg in process / hand-written loop", ratio, "1.05", took)]


def _half(config: Config, rounds: int, share: slice) -> float:
    hand_written(config, 1, share)
    return seconds(lambda: hand_written(config, rounds, share))


def side_by_side(config: Config, rounds: int) -> float:
    """Seconds a round of two hand-written loops in two processes, half of the clients each."""
    halves = [slice(0, None, 2), slice(1, None, 2)]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        took = [pool.submit(_half, config, rounds, half) for half in halves]
        return max(one.result() for one in took) / rounds


def ray(engine: str = "ray", bar: str = "1.15") -> Rows:
    """A round on two actors over two hand-written loops side by side; medians of alternating
    runs."""
    pairs = np.array([(_on(engine), side_by_side(protocol(), ROUNDS)) for _ in range(REPEATS)])
    ours, loops = np.median(pairs, axis=0)
    ratio = float(np.median(pairs[:, 0] / pairs[:, 1]))
    row = f"FedAvg on {engine}, two clients at once / two hand-written loops"
    return [(row, ratio, bar, f"{ours:.2f} / {loops:.2f} a round")]


def _on(engine: str) -> float:
    """Seconds of a later round of FedAvg on the engine."""
    config = protocol() | {"rounds": 3 * ROUNDS}
    with tempfile.TemporaryDirectory() as folder:
        jobs = make_jobs(config, ["fedavg"], [0], Path(folder))
        reports: list[dict] = []

        def follow(jobs) -> None:
            reports.extend(report for job in jobs for report in job.news())

        run_jobs(jobs, engine, APPS, follow=follow)
        if jobs[0].error:
            raise RuntimeError(jobs[0].error)
    rounds = [report["seconds"] for report in reports if ROUNDS < report["round"] < 3 * ROUNDS]
    return float(np.median(rounds))


def start() -> Rows:
    """From the call to the end of the first round on digits, Ray actors over Flower's engine;
    medians of alternating runs."""
    config = defaults() | {"rounds": 1, "num-clients": 10}

    def first_round(engine: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            jobs = make_jobs(config, ["fedavg"], [0], Path(folder))
            took = seconds(lambda: run_jobs(jobs, engine, APPS, follow=lambda _: None))
        if jobs[0].error:
            raise RuntimeError(jobs[0].error)
        return took

    pairs = np.array([(first_round("ray"), first_round("flower")) for _ in range(REPEATS)])
    ours, others = np.median(pairs, axis=0)
    row = "a run of one round, Ray actors / Flower's engine"
    return [
        (row, float(np.median(pairs[:, 0] / pairs[:, 1])), "0.50", f"{ours:.1f} / {others:.1f}")
    ]


MEASURES = {
    "in-process": in_process,
    "ray": ray,
    "flower": lambda: ray("flower", "1.40"),
    "start": start,
    "fedtta": bench_fedtta.rows,
    "pfedhn": bench_pfedhn.rows,
    "odpfl-hn": bench_odpfl.rows,
    "fedembed": bench_fedembed.rows,
    "data": bench_data.rows,
    "clients": bench_clients.rows,
    "clients-ray": bench_clients.on_actors,
    "cohort": bench_cohort.rows,
    "peers": bench_peers.rows,
}


def main(names: list[str]) -> None:
    """Measure the named rows, by default all, and print the table."""
    if unknown := set(names) - MEASURES.keys():
        raise SystemExit(f"unknown {', '.join(unknown)}; known: {', '.join(MEASURES)}")
    try:
        partitions.federation(protocol())  # else each client of each run would look for the data
    except ValueError as error:
        raise SystemExit(str(error)) from error
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    table = Table("what", "ratio", "bar", "seconds", title="Ratios in one run")
    console = Console()
    for name in names or MEASURES:
        with console.status(f"measuring {name}"):
            measured = MEASURES[name]()
        for what, ratio, bar, took in measured:
            table.add_row(what, f"{ratio:.2f}", f"≤ {bar}" if bar else "", took)
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
