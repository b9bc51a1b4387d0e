"""The simulated time to an accuracy, from runs' files."""

import json

from run_folders import leave

from experiments.time_to_accuracy import time_to
from fedapps.results.runs import read_runs


def test_the_first_evaluation_that_reaches_it_counts(tmp_path):
    """Seed 0 reaches 90 % in round 2 at 8 s, seed 1 in round 3 at 12 s and falls back: 10 ± 2.8 s.
    Of tent's seeds the first alone does. Ditto's never does."""
    curves = {
        ("fedavg", 0): (0.5, 0.9, 0.95),
        ("fedavg", 1): (0.5, 0.89, 0.9, 0.8),
        ("tent", 0): (0.9,),
        ("tent", 1): (0.8,),
        ("ditto", 0): (0.5,),
    }
    for (method, seed), curve in curves.items():
        run = leave(tmp_path, method, seed, [0.5])
        lines = []
        for number, accuracy in enumerate(curve, 1):
            report = {"round": number, "simulated-seconds": 4.0 * number}
            lines.append(json.dumps(report | {"evaluation": {"train-accuracy": accuracy}}))
        (run / "metrics.jsonl").write_text("\n".join(lines))
    rows = {row[0]: row[1:4] for row in time_to(read_runs(tmp_path)[0], 90.0).rows}
    assert rows["fedavg"] == ["10.0 ± 2.8", "2 ± 1", "87.50 ± 10.61"]
    assert rows["tent"][0] == "4.0 (1 of 2 seeds)"
    assert rows["ditto"] == ["never", "–", "50.00"]
