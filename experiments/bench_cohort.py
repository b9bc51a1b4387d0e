"""Cohorts over clients one by one: ``python -m experiments.benchmark cohort``. Needs MNIST.

On a GPU if there is one: a cohort pays there alone."""

import numpy as np

from experiments.bench_clients import later_rounds
from fedapps.settings.config import Config, defaults

ROUNDS, REPEATS = 8, 5
TRAINING = {"mlp": "0.10", "lenet": "0.20", "convnet": ""}  # networks, and the bar of each
Rows = list[tuple[str, float, str, str]]  # what, ratio, bar, in seconds


def protocol(model: str) -> Config:
    """FedAvg, FedTTA's federation: 50 clients train, 20 steps of 64 samples each."""
    return defaults() | {
        "model": model,
        "dataset": "mnist",
        "num-clients": 100,
        "rounds": ROUNDS,
        "evaluate-every": 10**6,
        "checkpoint-every": 0,
        "lr": 0.1,
    }


def measured(config: Config) -> tuple[float, float]:
    """Seconds of a later round, evaluation apart, and those of its clients' turn."""
    phases = later_rounds(config)
    rounds = [sum(one.values()) for one in phases]
    return float(np.median(rounds)), float(np.median([one["clients"] for one in phases]))


def rows(models: tuple[str, ...] = tuple(TRAINING), cohort: int = 50) -> Rows:
    """A cohort's round over one of clients in turn; medians of alternating runs."""
    table: Rows = []
    for model in models:
        config = protocol(model)
        pairs = [(measured(config | {"cohort": cohort}), measured(config)) for _ in range(REPEATS)]
        for at, what in enumerate(("round", "clients' turn")):
            ours, others = (float(np.median([pair[i][at] for pair in pairs])) for i in (0, 1))
            bar = TRAINING[model] if at else ""
            took = f"{ours:.3f} / {others:.3f}"
            table.append((f"{model}: {what} of a cohort / in turn", ours / others, bar, took))
    return table
