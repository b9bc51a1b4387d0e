"""What a limit cut of the replies of a run is in its rounds, its summary and its table."""

import json

from small_runs import fedapps

TINY = ("run", "num-clients=4", "rounds=3", "local-steps=1", "--engine", "in-process")


def summary_of(folder):
    return json.loads((folder / "fedavg-seed0" / "summary.json").read_text())


def test_the_table_and_the_summary_count_limited_replies(tmp_path):
    """Lengths below a tenth and counts below half of the usual ones cut every reply of the two
    training clients, once there is a usual length: none is shorter than the others' tenth."""
    options = ("max-update-ratio=0.1", "max-examples-ratio=0.5", "--output", tmp_path)
    printed = " ".join(fedapps(*TINY, *options).split())
    summary = summary_of(tmp_path)
    clipped, recounted = summary["clipped_replies"], summary["recounted_replies"]
    assert clipped > 0 and recounted > 0
    assert f"training replies scaled down by a limit on their length: fedavg {clipped}" in printed
    assert f"that a limit counts with fewer samples: fedavg {recounted}" in printed
    file = tmp_path / "fedavg-seed0" / "metrics.jsonl"
    rounds = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(round_.get("clipped", 0) for round_ in rounds) == clipped
    assert sum(round_.get("recounted", 0) for round_ in rounds) == recounted


def test_without_limits_nothing_is_said(tmp_path):
    printed = fedapps(*TINY, "--output", tmp_path)
    assert "by a limit" not in printed and "a limit counts" not in printed
    assert summary_of(tmp_path)["clipped_replies"] == 0
