"""FedAvg beside other simulators: ``python -m experiments.benchmark peers``. Needs MNIST, `uv`, and
the package registry, from which each simulator comes into an environment of its own.

The work and how each is set up stand in experiments/peers.py."""

import json
import subprocess
import sys

import numpy as np

from experiments.peers import CONTESTANTS, WORKS

REPEATS = 5
PACKAGES = {"fluke": "fluke-fl==0.8.1", "FedLab": "fedlab==1.3.0", "pfl-research": "pfl==0.6.0"}
TIMEOUT = 1800
Rows = list[tuple[str, float, str, str]]  # what, ratio, bar, in seconds


def measured(name: str) -> np.ndarray:
    """Seconds of a round (works,), the first round left out, in a process of its own."""
    package = PACKAGES.get(name)
    command = ["uv", "run", "-q", "--with", package, "python"] if package else [sys.executable]
    done = subprocess.run(
        [*command, "-m", "experiments.peers", name],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    seconds = json.loads(done.stdout.strip().splitlines()[-1])
    return np.array([np.mean(rounds[1:]) for rounds in seconds])


def rows(repeats: int = REPEATS) -> Rows:
    """Every simulator's round over that of the hand-written loop, medians of repeats that take
    turns."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in CONTESTANTS}
    for _ in range(repeats):
        for name, runs in found.items():
            runs.append(measured(name))
    loop = np.array(found["hand-written loop"])
    table: Rows = []
    for number, (model, batch) in enumerate(WORKS):
        for name, runs in found.items():
            seconds = np.array(runs)[:, number]
            ratio = float(np.median(seconds / loop[:, number]))
            took = f"{np.median(seconds):.2f} / {np.median(loop[:, number]):.2f} a round"
            table.append((f"{model}, batches of {batch}: {name}", ratio, "", took))
    return table
