"""Novel clients' gains, worked out by hand."""

import json

import numpy as np
import pytest
from run_folders import leave
from small_runs import invoke

from fedapps.methods import METHODS
from fedapps.results.comparison import DISTILLS
from fedapps.results.gains import novel_scores
from fedapps.results.plot import gain
from fedapps.results.runs import read_runs


def fail(run):
    """Its summary becomes that of a failure."""
    (run / "summary.json").write_text(json.dumps({"error": "boom"}))


def test_gains_by_client_and_seed(tmp_path):
    """Seed 0: FedAvg 50, 60, 90, TENT 58, 59.5, 70: gains 8, −0.5, −20, mean −12.5/3; one of three
    loses more than a point. The lowest tenth of three is the worst, 58. Seed 1 gains 4 alike. Costs
    of two evaluations, 2 and 4 ms: 3 ms; 5 + 1 kB."""
    leave(tmp_path, "fedavg", 0, [0.5, 0.6, 0.9])
    run = leave(tmp_path, "tent", 0, [0.58, 0.595, 0.7])
    leave(tmp_path, "fedavg", 1, [0.1, 0.2, 0.3])
    leave(tmp_path, "tent", 1, [0.14, 0.24, 0.34])
    lines = [
        {"round": r, "phases": {"novel-client": s}, "novel-megabytes": {"down": 0.005, "up": 0.001}}
        for r, s in ((1, 0.002), (2, 0.004))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs, _ = read_runs(tmp_path)
    found = novel_scores(runs).set_index(runs.name)
    expected = [(58 + 59.5 + 70) / 3, -12.5 / 3, 100 / 3, 58, 3, 6]
    assert found.loc["tent-seed0"].tolist() == pytest.approx(expected)
    assert found.loc["tent-seed1", ["gain", "harmed"]].tolist() == pytest.approx([4, 0])
    assert found.loc["fedavg-seed0", "gain"] == 0
    args = ["table", tmp_path, "--scores", "gain,harmed", "--format", "markdown"]
    done = invoke(*args)
    assert "| tent | −0.08 ± 5.77 | 16.67 ± 23.57 | 2 |" in done.output
    invoke(*args[:3], "luck", code=2)


def test_a_run_that_lost_clients_of_its_reference_is_named(tmp_path, caplog):
    """TENT has two of three clients on seed 0, and all on seed 1, where its gain is 4."""
    for seed in (0, 1):
        leave(tmp_path, "fedavg", seed, [0.1, 0.2, 0.3])
        leave(tmp_path, "tent", seed, [0.14, 0.24, 0.34][: seed + 2])
        leave(tmp_path, "shot", seed, [0.14, 0.24, 0.34])
    runs, _ = read_runs(tmp_path)
    assert novel_scores(runs).gain.round(6).tolist().count(4) == 4
    (record,) = caplog.records
    assert record.getMessage() == (
        "tent-seed0 lacks 1 of the 3 novel clients of fedavg; its scores are over the others"
    )


def test_scenarios_stand_side_by_side_with_a_test_over_five_seeds(tmp_path):
    """Gains of five seeds, in points: 2, 3, 4, 2, 9: mean 4, variance 8.5, t = 4 / √(8.5 / 5) =
    3.07 with 4 degrees of freedom: p = 0.037. In the second scenario one seed: no test."""
    for seed, points in enumerate((2, 3, 4, 2, 9)):
        leave(tmp_path / "shift", "fedavg", seed, [0.5, 0.6])
        leave(tmp_path / "shift", "tent", seed, [0.5 + points / 100, 0.6 + points / 100])
    leave(tmp_path / "iid", "fedavg", 0, [0.5, 0.6])
    leave(tmp_path / "iid", "shot", 0, [0.4, 0.3])
    args = ["table", tmp_path, "--scores", "gain,harmed", "--format", "markdown"]
    done = invoke(*args)
    assert "| method | iid | shift |" in done.output
    assert "| tent | – | 4.00 ± 2.92 (p 0.037) |" in done.output
    assert "| shot | −20.00 | – |" in done.output and "| shot | 100.00 | – |" in done.output
    (tmp_path / "none").mkdir()
    assert "holds runs" in invoke("table", tmp_path / "none", "--scores", "gain", code=2).output


def test_a_column_for_each_swept_value_and_rows_that_say_what_tells_runs_apart(tmp_path):
    """Gains 1 at alpha 0.1, 3 at 1.0; the rounds, in which the methods differ, and an option that
    the partition does not read are in no label and part no client from its reference."""
    folder = tmp_path / "dirichlet"
    for alpha, points in (("0.1", 1), ("1.0", 3)):
        options = {"partition": "dirichlet", "rounds": 9}
        leave(folder, f"fedavg partition.alpha={alpha}", 0, [0.5], **options)
        other = {**options, "rounds": 0, "partition.samples": 77}
        leave(folder, f"tent partition.alpha={alpha}", 0, [0.5 + points / 100], **other)
        leave(folder, f"tent partition.alpha={alpha} adapt-steps=3", 0, [0.4], **other)
    args = ["table", tmp_path, "--scores", "gain", "--format", "markdown"]
    done = invoke(*args)
    lines = [line for line in done.output.splitlines() if line.startswith("| ")]
    assert lines[0] == "| method | dirichlet partition.alpha=0.1 | dirichlet partition.alpha=1.0 |"
    assert lines[2:] == [
        "| fedavg | 0.00 | 0.00 |",
        "| tent | 1.00 | 3.00 |",
        "| tent adapt-steps=3 | −10.00 | −10.00 |",
    ]


def test_gains_as_a_figure(tmp_path):
    """TENT gains 2 and 6 points under shift, mean 4, deviation √8; it loses 5 without."""
    for seed, points in enumerate((0.02, 0.06)):
        leave(tmp_path / "shift", "fedavg", seed, [0.5])
        leave(tmp_path / "shift", "tent", seed, [0.5 + points])
    leave(tmp_path / "iid", "fedavg", 0, [0.5])
    leave(tmp_path / "iid", "tent", 0, [0.45])
    (axis,) = gain(tmp_path).axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["iid", "shift"]
    bars = {bar.get_label(): bar for bar in axis.containers}
    places, means = bars["tent"][0].get_xydata().T
    assert places.round().tolist() == [0, 1] and means.tolist() == pytest.approx([-5, 4])
    low, high = bars["tent"][2][0].get_segments()[1][:, 1]
    assert (high - low) / 2 == pytest.approx(8**0.5)
    assert bars["fedavg"][0].get_xydata()[:, 1].tolist() == [0, 0]
    invoke("plot", tmp_path, "gain", "--output", tmp_path / "gain.png")
    assert (tmp_path / "gain.png").is_file()


def test_a_loss_of_exactly_one_point_harms_nobody(tmp_path):
    """Accuracies of 200 samples come as float32, whose differences are off by some 1e-6."""
    before = [float(np.float32(k / 200)) for k in range(2, 201)]
    leave(tmp_path, "fedavg", 0, before)
    leave(tmp_path, "tent", 0, [float(np.float32((k - 2) / 200)) for k in range(2, 201)])
    leave(tmp_path, "shot", 0, [a - 0.0101 for a in before])
    runs, _ = read_runs(tmp_path)
    found = novel_scores(runs).set_index(runs.name)
    assert found.loc["tent-seed0", "harmed"] == 0
    assert found.loc["shot-seed0", "harmed"] == 100


def test_clients_of_other_splits_are_no_pair(tmp_path):
    """FedMD deals public samples where none are asked for; data-seed deals anew, unless it is the
    run's seed."""
    leave(tmp_path, "fedavg", 0, [0.5])
    leave(tmp_path, "fedmd", 0, [0.6])
    leave(tmp_path, "tent", 0, [0.7], **{"data-seed": 1})
    leave(tmp_path, "shot", 0, [0.8], **{"data-seed": 0})
    runs, _ = read_runs(tmp_path)
    gains = novel_scores(runs).set_index(runs.name).gain
    assert gains.isna().to_dict() == {
        "fedavg-seed0": False, "fedmd-seed0": True, "tent-seed0": True, "shot-seed0": False,
    }  # fmt: skip
    public = {name for name, entry in METHODS.known().items() if entry.client.needs_public}
    assert public == {n for n, e in METHODS.known().items() if DISTILLS in (n, e.extends)}


def test_runs_that_failed_or_are_missing_are_named(tmp_path):
    """A scenario whose runs all failed has no column; FedAvg's failure leaves gains unknown."""
    leave(tmp_path / "good", "fedavg", 0, [0.5])
    leave(tmp_path / "good", "tent", 0, [0.6])
    leave(tmp_path / "lone", "tent", 0, [0.6])
    fail(leave(tmp_path / "lone", "fedavg", 0, [0.5]))
    fail(leave(tmp_path / "bad", "fedavg", 0, [0.5]))
    done = invoke("table", tmp_path, "--scores", "gain", "--format", "markdown")
    assert "| method | good | lone |" in done.output and "| tent | 10.00 | – |" in done.output
    assert "bad is left out" in done.output and "lone: fedavg-seed0 failed" in done.output
    assert "all runs failed" in invoke("table", tmp_path / "bad", "--scores", "gain", code=2).output
    refused = invoke("table", tmp_path, "--scores", "gain", "--round", "latest", code=2)
    assert "'latest'" in refused.output


def test_only_the_references_settings_tell_pairs_apart(tmp_path):
    """FedAvg has no adapt-steps, but alpha, as TENT has."""
    for alpha, points in (("0.1", 1), ("1.0", 3)):
        leave(tmp_path, f"fedavg partition.alpha={alpha}", 0, [0.5], partition="dirichlet")
        label = f"tent partition.alpha={alpha} adapt-steps=3"
        leave(tmp_path, label, 0, [0.5 + points / 100], partition="dirichlet")
    runs, _ = read_runs(tmp_path)
    gains = novel_scores(runs).gain[[name.startswith("tent") for name in runs.name]]
    assert sorted(gains) == pytest.approx([1, 3])
