"""`fedapps reproduce`: which experiments run a table, the check of its data, and the comparison."""

import json
import os
from pathlib import Path

import pytest
from dataset_files import idx_pairs
from run_folders import leave
from small_runs import fedapps

from fedapps.reproduction import as_table, check_facts, measured, parts_of, requested
from fedapps.results.method_code import essence
from fedapps.results.runs import read_runs
from fedapps.settings.experiments import experiments_root
from fedapps.settings.published_tables import read_table

LIMITS = {"dataset": "mnist", "partition": "pathological"}


def of(table, data=""):
    return {part.name: len(part.columns) for part in parts_of(table, data)}


def test_each_column_has_the_experiment_with_most_of_its_rows():
    """Five data sets have a file each; MNIST's file that follows the text alone is left out."""
    assert of("fedtta/table1") == dict.fromkeys(
        [f"fedtta/table1-{name}" for name in
         ("mnist", "cifar10", "femnist", "cifar100", "fashion-mnist")], 1)  # fmt: skip
    # Of 9000 users only five methods run; those of 900 have all nine.
    assert "fedembed/mnist-9000" not in of("fedembed/table2")


def test_data_choose_their_column_or_stand_for_the_papers():
    """pFedHN's table has three columns of CIFAR-10, whose classes are as many as MNIST's."""
    assert of("fedtta/table1", "mnist") == {"fedtta/table1-mnist": 1}
    assert [part.substitute for part in parts_of("fedtta/table1", "mnist")] == [""]
    assert of("pfedhn/table1", "mnist") == {"pfedhn/table1-cifar10": 3}
    part = parts_of("pfedhn/table1", "mnist")[0]
    asked = requested(part, rounds=2, seeds="4")
    assert asked.settings["dataset"] == "mnist" and asked.settings["rounds"] == 2
    assert "rounds=" in part.experiment.methods and "rounds=" not in asked.methods
    assert asked.seeds == "4"


def test_classes_stand_for_the_superclasses_that_a_substitute_has_not(tmp_path, monkeypatch):
    """pFedHN's Figure 4, a superclass of CIFAR-100 a client: 200 images of 10 classes
    for 10 clients, each with one class."""
    idx_pairs(tmp_path / "mnist")
    monkeypatch.setenv("FEDAPPS_DATA_DIR", str(tmp_path))
    (part,) = parts_of("pfedhn/figure4", "mnist")
    part.experiment.settings["num-clients"] = 10
    asked = requested(part, rounds=2, seeds="0").settings
    assert asked["partition"] == "pathological" and asked["partition.classes-per-client"] == 1
    (line,) = check_facts(part)
    assert line.endswith("mnist has no superclasses: a client has one class")
    assert "clients 10, classes 10" in line
    (own,) = parts_of("pfedhn/figure4")
    assert requested(own, rounds=2, seeds="0").settings["partition"] == "coarse"


def test_a_type_stands_for_several_where_the_substitute_has_fewer(tmp_path, monkeypatch):
    """FedEmbed's 20 voices on ten digits. 20 % of the users prefer voice 0, 8 % voice 5, 4 % each
    other: type 0 has 0.2 + 0.04 (voice 10), type 5 has 0.08 + 0.04, the others 0.04 + 0.04."""
    idx_pairs(tmp_path / "mnist")
    monkeypatch.setenv("FEDAPPS_DATA_DIR", str(tmp_path))
    parts = {part.name: part for part in parts_of("fedembed/table3", "mnist")}
    assert len(parts) == 4
    balanced = requested(parts["fedembed/speech-balanced"], rounds=0, seeds="").settings
    assert balanced["pfedkm.sub-populations"] == 10 and "partition.shares" not in balanced
    part = parts["fedembed/speech-imbalanced"]
    asked = requested(part, rounds=0, seeds="").settings
    shares = "0.24,0.08,0.08,0.08,0.08,0.12,0.08,0.08,0.08,0.08"
    assert asked["partition.shares"] == shares and asked["pfedkm.sub-populations"] == 10
    small = {"num-clients": 50, "partition.samples-per-user": 6, "partition.test-per-user": 2}
    part.experiment.settings.update(small)
    (line,) = check_facts(part)
    assert "clients 50" in line and line.endswith("types k, k + 10, … of the paper's data")
    assert part.at(part.columns[0]) == {"partition.shares": shares, "dp": "none"}
    own = parts_of("fedembed/table3")
    assert [one.changes for one in own] == [{}] * 4


def test_novel_clients_get_a_second_dataset_with_the_substitutes_classes():
    """ODPFL-HN's novel clients with STL-10, trained on CIFAR-10: the digits for MNIST."""
    (part,) = parts_of("odpfl_hn/section6-8", "mnist")
    assert requested(part, rounds=0, seeds="").settings["partition.novel-dataset"] == "digits"
    assert part.notes == ["novel clients have digits"]
    (part,) = parts_of("odpfl_hn/section6-8", "fashion-mnist")
    with pytest.raises(ValueError, match="there is none for fashion-mnist; use --data mnist"):
        check_facts(part)


@pytest.mark.parametrize("table, data, text", [
    ("fedtta/table9", "", "unknown table 'fedtta/table9'; known: fedembed/table2"),
    ("fedembed/table4", "", "no runs of its own: the runs of fedembed/mnist-imbalanced"),
    ("fedtta/table1", "digits", "--data is 'digits'; choose one of fashion-mnist, mnist"),
])  # fmt: skip
def test_what_cannot_be_reproduced_is_refused(table, data, text):
    with pytest.raises(ValueError, match=text):
        parts_of(table, data)


def test_the_comparison_by_hand(tmp_path):
    """FedAvg's novel clients: (0.90 + 0.94) / 2 = 92 %, deviation √(2²+2²) = 2.83; the paper has
    94.69. Another number of clients belongs to no column, and FedPer has no row."""
    part = parts_of("fedtta/table1", "mnist")[0]
    for seed, accuracy in enumerate((0.90, 0.94)):
        leave(tmp_path, "fedavg", seed, [accuracy], rounds=200, **LIMITS)
    leave(tmp_path, "fedper", 0, [0.5], **LIMITS)
    leave(tmp_path, "tent", 0, [0.5], **LIMITS | {"dataset": "digits"})
    found = measured(part, read_runs(tmp_path)[0])
    assert {(cell.column, cell.row) for cell in found} == {("MNIST", "fedavg")}
    novel = {cell.score: cell for cell in found}["novel-accuracy"]
    assert novel.value == pytest.approx(92) and novel.spread == pytest.approx(8**0.5)
    assert novel.seeds == [0, 1] and novel.rounds == 200
    shown = as_table("fedtta/table1", [part], [novel])
    assert shown.rows == [
        ["MNIST", "FedAvg", "novel clients", "92.00 ± 2.83", "94.69", "−2.69", "2"]
    ]
    part.substitute = "mnist"  # other data than the column's: no difference
    assert as_table("fedtta/table1", [part], [novel]).rows[0][4:6] == ["94.69", "–"]


def test_data_that_are_not_the_papers_are_refused(tmp_path, monkeypatch):
    idx_pairs(tmp_path / "mnist")
    monkeypatch.setenv("FEDAPPS_DATA_DIR", str(tmp_path))
    said = fedapps("reproduce", "fedtta/table1", "--data", "mnist", code=2)
    assert "samples 200 (the paper has 70000)" in said and "fedapps run fedtta/table1-mnist" in said


def test_a_table_runs_continues_and_is_written(tmp_path, monkeypatch):
    idx_pairs(tmp_path / "mnist")
    monkeypatch.setenv("FEDAPPS_DATA_DIR", str(tmp_path))
    words = ["reproduce", "odpfl_hn/figure4", "--data", "mnist", "--rounds", "1"]
    words += ["--engine", "in-process", "--jobs", "1", "--output", str(tmp_path / "out")]
    fedapps(*words)
    record = json.loads((tmp_path / "out" / "reproduced.json").read_text("utf-8"))
    assert record["command"] == "fedapps reproduce odpfl_hn/figure4 --data mnist --rounds 1"
    assert record["changes"] == {"data": "mnist", "rounds": 1}
    (cell,) = record["cells"]
    assert (cell["row"], cell["score"], cell["dataset"], cell["seeds"]) == (
        "odpfl-hn", "novel-accuracy", "mnist", [0])  # fmt: skip
    assert len(cell["code"]) == 12
    assert "ODPFL-HN" in (tmp_path / "out" / "table.md").read_text("utf-8")
    assert "finished" in fedapps(*words, "--dry-run")


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(os.environ.get("FEDAPPS_DATA_DIR", "/nowhere")) / "mnist").is_dir(),
    reason="real MNIST is not there",
)
def test_two_rounds_of_fedttas_table_1_have_all_fourteen_rows(tmp_path):
    """Each row has training and new clients. FedPer runs, too, and has no row in the paper."""
    words = ["reproduce", "fedtta/table1", "--data", "mnist", "--rounds", "2", "--seeds", "0"]
    fedapps(*words, "--engine", "in-process", "--jobs", "1", "--output", str(tmp_path))
    cells = json.loads((tmp_path / "reproduced.json").read_text("utf-8"))["cells"]
    rows = read_table("fedtta/table1", experiments_root())["rows"]
    assert len(rows) == 14
    scores = ("train-accuracy", "novel-accuracy")
    found = sorted((cell["row"], cell["score"]) for cell in cells)
    assert found == sorted((row, score) for row in rows for score in scores)
    for cell in cells:
        assert (cell["dataset"], cell["rounds"], cell["seeds"]) == ("mnist", 2, [0])
        assert 0 < cell["value"] < 100
    table = (tmp_path / "table.md").read_text("utf-8")
    assert all(table.count(f"| {title} |") == 2 for title in rows.values())


def test_the_version_of_a_method_is_that_of_its_statements():
    """Comments, docstrings, imports and line breaks do not count; a number does."""
    one = '"""Head."""\nimport os\n\n\ndef f(x):  # why\n    """Text."""\n    return (x +\n 1)\n'
    assert essence(one) == essence("def f(x):\n    return x + 1")
    assert essence(one) != essence("def f(x):\n    return x + 2")
