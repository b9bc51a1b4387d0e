"""What a run's folder says of late replies and of simulated time."""

import json

import pytest
from small_runs import LATE, fedapps, federate


def test_the_summary_has_the_totals_of_all_rounds(tmp_path):
    """Of three training clients one takes three seconds, the others one: late in round 1, used in
    round 3 at age 2, and late again in round 4."""
    folder = tmp_path / "fedavg-seed0"
    federate(**LATE, **{"rounds": 4, "output-dir": str(folder)})
    rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    assert [report["simulated-seconds"] for report in rounds] == [1, 2, 3, 4]
    assert [report["late"] for report in rounds] == [1, 0, 0, 1]
    assert [report.get("late-age") for report in rounds] == [None, None, 2, None]
    assert summary["simulated_seconds"] == 4
    assert (summary["late"], summary["late_used"], summary["late_dropped"]) == (2, 1, 0)
    assert summary["late_age"] == pytest.approx(2)
    fedapps("plot", tmp_path, "time", "--output", tmp_path / "time.svg")
    assert (tmp_path / "time.svg").is_file()
