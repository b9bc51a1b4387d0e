"""The cost of six corrections of one model: a command that runs all of them over one that runs
FedAvg alone, in the main job's federation."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.benchmarks.measure import Row, compare

# Methods that have one training, if none of them holds samples out. In this federation auto holds
# out none by default, since no client has enough samples to play newcomers.
METHODS = "fedavg,tent,t3a,bbse,prior-em,auto"
ONE_TRAINING = ("bbse.held-out=0",)
WITH_NEWCOMERS = (*ONE_TRAINING, "auto.held-out=0")  # of the samples that clients train on
REPEATS = 5


def processor_seconds(methods: str, settings: Sequence[str] = ()) -> float:
    """Processor time of ``fedapps run`` with these methods, in a new process: user and system."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedapps", "run", "--methods", methods, *settings]
        command += ["--engine", "in-process", "--jobs", "1", "--output", str(Path(folder, "runs"))]
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system


def rows(settings: Sequence[str] = ()) -> list[Row]:
    """Six methods over FedAvg alone, in turn, without newcomers of auto and with them; `settings`
    of all commands are for tests."""
    return [
        compared("", [*ONE_TRAINING, *settings], settings),
        compared(", auto with newcomers", [*WITH_NEWCOMERS, *settings], settings),
    ]


def compared(what: str, of_six: Sequence[str], of_one: Sequence[str]) -> Row:
    """The processor time of the six methods over that of FedAvg, each with its settings."""
    return compare(
        f"six corrections of one model{what} / FedAvg alone, processor time",
        "1.35",
        lambda: processor_seconds(METHODS, of_six),
        lambda: processor_seconds("fedavg", of_one),
        repeats=REPEATS,
        unit=" s",
    )
