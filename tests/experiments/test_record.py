"""Records of measurements: columns and rows by hand, and what an existing record keeps."""

import json

import pytest
from run_folders import leave

from experiments import record
from fedapps.results.method_code import code_of
from fedapps.results.runs import read_runs


def test_a_record_by_hand(tmp_path, monkeypatch):
    """Novel clients by two α; at α = 1.0 (0.90 + 0.94) / 2 = 92 %, deviation √(2²+2²) = 2.83."""
    monkeypatch.setattr(record, "MEASURED", tmp_path)
    runs = tmp_path / "runs"
    for seed, accuracy in enumerate((0.90, 0.94)):
        changes = {"dataset": "digits", "partition": "dirichlet-split", "rounds": 7}
        leave(runs / "far", "fedavg", seed, [accuracy], **changes, **{"partition.novel-alpha": 1.0})
    leave(runs / "near", "fedavg partition.novel-alpha=0.1", 0, [0.5], **changes)
    record.main("alphas", [runs / "far", runs / "near"], "fedapps run", page="digits.md",
                column="α = {partition.novel-alpha}", scores="novel")  # fmt: skip
    saved = json.loads((tmp_path / "alphas.json").read_text("utf-8"))
    far, near = saved["cells"]
    assert far["column"] == "α = 1.0" and near["column"] == "α = 0.1"
    assert far["value"] == pytest.approx(92) and far["spread"] == pytest.approx(2.8284)
    assert far["seeds"] == [0, 1] and near["seeds"] == [0] and near["spread"] is None
    assert near["row"] == "fedavg"  # its column has the setting
    assert (far["row"], far["score"], far["rounds"]) == ("fedavg", "novel-accuracy", 7)
    record.main("alphas", [runs / "near"])  # the texts are those of before
    again = json.loads((tmp_path / "alphas.json").read_text("utf-8"))
    assert again["cells"] == [near] and again["page"] == "digits.md"


def test_a_record_keeps_the_fingerprint_of_each_rows_settings(tmp_path, monkeypatch, capsys):
    """Two α of the data share one, since they change no method; μ = 0.5 has another. A run of other
    files of its method has none."""
    monkeypatch.setattr(record, "MEASURED", tmp_path)
    runs = tmp_path / "runs"
    alphas = "fedprox partition.novel-alpha="
    for label in (f"{alphas}0.1", f"{alphas}1.0", "fedprox mu=0.5", "fedavg"):
        folder = leave(runs, label, 0, [0.5], dataset="digits", partition="dirichlet-split")
        summary = json.loads((folder / "summary.json").read_text())
        summary["code"] = code_of("fedprox")  # not FedAvg's
        (folder / "summary.json").write_text(json.dumps(summary))
    column = "α = {partition.novel-alpha}"
    record.main("means", [runs], "fedapps run", column=column, scores="novel")
    saved = json.loads((tmp_path / "means.json").read_text("utf-8"))
    rows = [cell["row"] for cell in saved["cells"]]
    assert rows == ["fedavg", "fedprox mu=0.5", "fedprox", "fedprox"]
    assert [cell.get("fingerprint") for cell in saved["cells"]] == [None, 0, 1, 1]
    settings = [one["settings"] for one in saved["fingerprints"]]
    plain = {"method": "fedprox", "local-steps": 3}
    assert settings == [plain | {"fedprox.mu": 0.5}, plain]
    numbers = [one["numbers"]["squares"] for one in saved["fingerprints"]]
    assert numbers[0] > 0 and numbers[0] != numbers[1]
    assert "'fedavg'): the method's files have changed" in capsys.readouterr().out


def test_what_a_record_refuses(tmp_path):
    """Two runs of one seed in a cell, an unknown setting and an unknown score."""
    for alpha in (0.1, 1.0):
        changes = {"partition": "dirichlet-split", "partition.novel-alpha": alpha}
        leave(tmp_path / str(alpha), "fedavg", 0, [0.5], **changes)
    cells = []
    for folder in sorted(tmp_path.iterdir()):
        cells += record.recorded(read_runs(folder)[0], "digits", ["novel-accuracy"])
    with pytest.raises(ValueError, match=r"row 'fedavg' has the seeds \[0, 0\]; name the setting"):
        record.check_seeds(cells)
    record.check_seeds(cells[:1])
    runs = read_runs(tmp_path / "0.1")[0]
    with pytest.raises(ValueError, match="names 'alfa', which is no setting"):
        record.recorded(runs, "{alfa}", ["novel-accuracy"])
    with pytest.raises(ValueError, match="names 'novell'; known: train-accuracy, novel-accuracy"):
        record.recorded(runs, "digits", ["novell"])
