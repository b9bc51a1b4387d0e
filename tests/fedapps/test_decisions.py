"""What clients chose without labels: in summary.json, in the report and in the figure."""

import json

import pytest
from run_folders import leave
from small_runs import fedapps, update

from fedapps.results.plot import decisions
from fedapps.results.recorder import _client
from fedapps.results.report import decision_tables, shared_trainings, write_report
from fedapps.results.runs import decisions_of, read_runs

LIMIT = {"misfit-limit": 2.5}
KEPT = {"chosen": "none", "misfit": 5.0, **LIMIT, "expected-gain": 0.0, "base-accuracy": 0.5}
GAINED = {"chosen": "bbse", "misfit": 1.0, **LIMIT, "expected-gain": 0.125, "base-accuracy": 0.25}
HARMED = {"chosen": "bbse", "misfit": 2.0, **LIMIT, "expected-gain": 0.0625, "base-accuracy": 0.75}


def decided(folder, *choices, novel=(0.5, 0.5, 0.5), seed=0):
    """A run of auto with two training clients, 0 and 1, and novel ones with these choices."""
    run = leave(folder, "auto", seed, novel)
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    for client, choice in enumerate(choices, 2):
        summary["per_client"][str(client)] |= choice
    file.write_text(json.dumps(summary))
    return run


def test_a_clients_line_has_its_decision():
    """Of three batches BBSE was chosen for two."""
    numbers = {"misfit": 1.5, "misfit-limit": 2.5, "expected-gain": 0.0625, "win-rate": 0.25}
    shares = {"chosen-none": 1 / 3, "chosen-bbse": 2 / 3, "chosen-bn16": 0.0}
    reply = update(4, {}, 10, accuracy=0.5, **{"base-accuracy": 0.25}, **numbers, **shares)
    line = _client(reply)
    assert line["chosen"] == "bbse"
    assert (line["misfit"], line["misfit-limit"], line["expected-gain"]) == (1.5, 2.5, 0.0625)
    assert line["base-accuracy"] == 0.25 and "win-rate" not in line
    other = update(4, {}, 10, accuracy=0.5, **{"base-accuracy": 0.25})
    assert _client(other).keys() == {"role", "examples", "accuracy"}


def test_the_report_says_who_got_what(tmp_path):
    """Client 3 won 25 points, client 4 lost 25: expected 12.5 and 6.25, half of BBSE's harmed."""
    decided(tmp_path, KEPT, GAINED, HARMED)
    leave(tmp_path, "fedavg", 0, [0.5])
    runs, problems = read_runs(tmp_path)
    by_choice, by_client = decision_tables(runs)
    assert by_choice.rows == [
        ["auto", "none", "33 %", "5.00", "2.50", "+0.00", "+0.00", "0"],
        ["auto", "bbse", "67 %", "1.50", "2.50", "+9.38", "+0.00", "50"],
    ]
    assert by_client.rows[1] == ["3", "auto", "0", "bbse", "1.00", "2.50", "+12.50", "+25.00"]
    page = write_report(runs, tmp_path, problems).read_text("utf-8")
    assert 'id="decisions"' in page and "T / t" in page
    assert decision_tables(runs[runs.method == "fedavg"]) == []


def test_the_report_says_what_played_newcomers_gain(tmp_path):
    file = decided(tmp_path, KEPT, GAINED, HARMED) / "summary.json"
    summary = json.loads(file.read_text())
    played = {"regime": "other-inputs", "clients": 40.0, "guard": 1.0, "corrected": 0.5}
    summary["played"] = [played | {"gain": 0.02675, "harmed": 0.0125}]
    file.write_text(json.dumps(summary))
    failed = leave(tmp_path, "fedavg", 0, [0.5]) / "summary.json"
    failed.write_text(json.dumps({"error": "ValueError: it has diverged"}))
    runs, problems = read_runs(tmp_path)
    _, of_played, _ = decision_tables(runs)
    assert of_played.rows == [["auto", "0", "others, T over t", "40", "50 %", "+2.67", "1.2"]]
    page = write_report(runs, tmp_path, problems).read_text("utf-8")
    assert "others, T over t" in page and "newcomers that training clients have played" in page


def test_without_labels_the_measured_gain_is_unknown(tmp_path):
    unlabeled = {**GAINED, "accuracy": None}
    del unlabeled["base-accuracy"]
    decided(tmp_path, unlabeled, novel=(0.5,))
    (row,) = decisions_of(read_runs(tmp_path)[0]).itertuples()
    assert (row.chosen, row.misfit, row.limit, row.expected) == ("bbse", 1.0, 2.5, 12.5)
    assert row.gain != row.gain
    assert len(decisions(read_runs(tmp_path)[0]).axes) == 1


def test_a_dot_stands_at_its_misfit_and_its_gain(tmp_path):
    run = decided(tmp_path / "runs", KEPT, GAINED, HARMED)
    figure = decisions(read_runs(run)[0])
    expected, measured = figure.axes
    none, bbse = measured.lines[:2]
    assert (none.get_label(), bbse.get_label()) == ("none", "bbse")
    assert none.get_xydata().tolist() == [[2, 0]]
    assert bbse.get_xydata().tolist() == [[0.4, 25], [0.8, -25]]
    assert expected.lines[1].get_xydata().tolist() == [[0.4, 12.5], [0.8, 6.25]]
    assert none.get_color() != bbse.get_color() and none.get_marker() != bbse.get_marker()
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "choice"
    assert [text.get_text() for text in legend.get_texts()] == ["none", "bbse", "T = t"]
    ticks = [tick for tick in measured.get_xticks() if tick <= 2]
    assert ticks == [0, 1, 2] and measured.get_xlim()[0] == 0
    output = tmp_path / "decisions.svg"
    fedapps("plot", run, "decisions", "--output", output)
    assert output.read_text().count("<svg") == 1
    leave(tmp_path / "other", "fedavg", 0, [0.5])
    with pytest.raises(ValueError, match=r"no novel client .* made a choice; .* has a rule$"):
        decisions(read_runs(tmp_path / "other")[0])


def test_the_report_names_runs_that_share_a_training(tmp_path):
    for seed in (0, 1):
        for method, training in (("fedavg", "a"), ("tent", "a"), ("bbse", "b"), ("local", "")):
            folder = f"/secret/{training}{seed}" if training else ""
            leave(tmp_path, method, seed, [0.5], **{"training-dir": folder})
    runs = read_runs(tmp_path)[0]
    assert shared_trainings(runs) == ["fedavg, tent share one training in each of seeds 0, 1."]
    page = write_report(runs, tmp_path).read_text("utf-8")
    assert "fedavg, tent share one training" in page and "secret" not in page
