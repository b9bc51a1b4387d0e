"""Cohorts over clients one by one: ``python -m experiments.benchmark cohort``. Needs MNIST.

On a GPU if there is one: a cohort pays there alone."""

import json
import tempfile
from pathlib import Path

import numpy as np

from fedapps.config import Config, defaults
from fedapps.engines.jobs import run_in_process

ROUNDS, REPEATS = 8, 5
TRAINING = {"mlp": "0.10", "lenet": "0.20", "convnet": ""}  # networks, and the bar of each
Rows = list[tuple[str, float, str, str]]  # what, ratio, bar, in seconds


def protocol(model: str, method: str = "fedavg") -> Config:
    """FedTTA's: 50 clients train, 20 steps of 64 samples each."""
    return defaults() | {
        "method": method,
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
    with tempfile.TemporaryDirectory() as folder:
        run_in_process(config | {"output-dir": folder})
        lines = (Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines()
    phases = [json.loads(line)["phases"] for line in lines[1:]]
    rounds = [sum(s for phase, s in one.items() if phase != "evaluate") for one in phases]
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
