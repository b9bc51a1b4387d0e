"""Cost of ODPFL-HN's three exchanges: ``python -m experiments.bench_odpfl``. Needs MNIST."""

import logging
import time
from collections import defaultdict
from typing import Any

import numpy as np

from fedapps.clientapp import app
from fedapps.engines.grid import InProcessGrid
from fedapps.serverapp import run
from fedapps.settings.config import Config, defaults

ROUNDS, REPEATS = 3, 3
PARTS = {"query.encode": "encode", "train": "train", "train.backprop": "backprop"}


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


def protocol() -> Config:
    """FedTTA's protocol on MNIST, a fifth of the training clients in a round."""
    return defaults() | {
        "dataset": "mnist",
        "num-clients": 100,
        "fraction-train": 0.2,
        "odpfl-hn.descriptor-dim": 32,
        "evaluate-every": 10**6,
    }


def rounds(config: Config, method: str, count: int) -> tuple[float, dict[str, float]]:
    """Seconds of `count` rounds of training, and the clients' part of them by type of message.

    The difference of two runs: what the start and the last evaluation cost falls out."""
    runs = []
    for number in (1, 1 + count):
        grid = TimedGrid.simulation(app, config, int(config["num-clients"]))
        started = time.perf_counter()
        run(grid, config | {"method": method, "rounds": number}, "in-process")
        runs.append((time.perf_counter() - started, dict(grid.seconds)))
    (first, before), (last, after) = runs
    return last - first, {key: after[key] - before.get(key, 0.0) for key in after}


def split(config: Config, count: int) -> tuple[float, dict[str, float]]:
    """Seconds of a FedAvg round, and those of an ODPFL-HN round by part."""
    fedavg = rounds(config, "fedavg", count)[0] / count
    whole, clients = rounds(config, "odpfl-hn", count)
    parts = {name: clients[key] / count for key, name in PARTS.items()}
    return fedavg, parts | {"server": whole / count - sum(parts.values())}


def rows() -> list[tuple[str, float, str, str]]:
    """The benchmark table's rows: what, ratio to a FedAvg round, bar, seconds."""
    config = protocol()
    measured = [split(config, ROUNDS) for _ in range(REPEATS)]
    fedavg = float(np.median([one for one, _ in measured]))
    parts = {name: float(np.median([p[name] for _, p in measured])) for name in measured[0][1]}
    every = {"round": sum(parts.values())} | parts
    return [
        (f"ODPFL-HN {name} / FedAvg round", took / fedavg, "", f"{took:.2f} / {fedavg:.2f}")
        for name, took in every.items()
    ]


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    for row in rows():
        print(*row, sep="  ")
