"""The cost of six corrections of one model: a command that runs all of them over one that runs
FedAvg alone, in the main job's federation."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.benchmarks.measure import Row, compare

# Methods that have one training, if none of them holds samples out.
METHODS = "fedavg,tent,t3a,bbse,prior-em,auto"
SETTINGS = ("bbse.held-out=0", "auto.held-out=0")
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
    """Six methods over FedAvg alone, in turn; `settings` of both are for tests."""
    return [
        compare(
            "six corrections of one model / FedAvg alone, processor time",
            "1.35",
            lambda: processor_seconds(METHODS, [*SETTINGS, *settings]),
            lambda: processor_seconds("fedavg", settings),
            repeats=REPEATS,
            unit=" s",
        )
    ]
