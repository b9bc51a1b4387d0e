"""Privacy from a run's settings to what its folder and its table say."""

import json

import pytest
from tiny import federate

from fedapps.results.runs import read_runs
from fedapps.results.table import results
from strategies.accountant import central_epsilon

PRIVATE = {"dp": "central", "dp-noise-multiplier": 1.5, "fraction-train": 0.5, "local-steps": 1}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_budget_goes_on_with_the_model(tmp_path):
    """Two rounds and one more are three; evaluated later, the model has still cost three."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    start = {}
    for folder, rounds in zip(folders, (2, 1, 0), strict=True):
        federate(**PRIVATE | start, rounds=rounds, **{"output-dir": str(folder)})
        start = {"from-dir": str(folder)}
    told = [summary(folder)["privacy"]["epsilon"] for folder in folders]
    two, three = (central_epsilon({(1.5, 0.5): n}, 1e-5) for n in (2, 3))
    assert told == [two, three, three]


def test_a_model_trained_without_privacy_is_no_start(tmp_path):
    federate(rounds=1, **{"output-dir": str(tmp_path), "local-steps": 1})
    with pytest.raises(ValueError, match=r"holds no privacy\.json: its model was trained without"):
        federate(**PRIVATE, **{"from-dir": str(tmp_path)})


def test_tables_name_terms_and_test_settings(tmp_path):
    for name, more in (("fedavg-seed0", {"dp-generator": "seeded"}), ("fedprox-seed0", {})):
        own = {"method": name.split("-")[0], "output-dir": str(tmp_path / name), "rounds": 1}
        federate(**PRIVATE | own | more)
    shown = results(read_runs(tmp_path)[0])
    cells = [row[shown.columns.index("ε")] for row in shown.rows]
    assert cells[0].endswith("(1e-05) TEST") and cells[1].endswith("(1e-05)")
    assert "ε of fedavg: one user added or removed" in shown.caption
    assert "TEST SETTING" in shown.caption
    assert [row[-1] for row in shown.rows] == ["–", "–"]
    assert summary(tmp_path / "fedprox-seed0")["train"]["accuracy"] is None
