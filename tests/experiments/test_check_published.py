"""The papers' tables as data, and the experiments that must have what they state."""

import math
import re
from dataclasses import replace

import pytest

from experiments import check_published
from experiments.check_published import problems_of, uncovered
from fedapps.results.published import SCORE_COLUMNS, Published
from fedapps.settings.experiments import (
    Experiment,
    experiments,
    experiments_root,
    read_experiment,
)
from fedapps.settings.published_tables import (
    BESIDE_SCORES,
    cells,
    published_columns,
    published_tables,
    read_table,
    row_of,
)

# Reading all experiments would make the collection of all tests a twentieth longer.
OF_PAPERS = sorted(
    name
    for name, file in experiments().items()
    if re.search(r"^published = ", file.read_text("utf-8"), re.M)
)


@pytest.mark.parametrize("name", OF_PAPERS)
def test_every_setting_of_an_experiment_is_the_papers_or_has_its_reason(name):
    assert problems_of(read_experiment(name)) == []


def test_every_row_and_every_column_of_the_papers_is_in_an_experiment():
    read = {name: read_experiment(name) for name in experiments()}
    assert sorted(name for name, asked in read.items() if asked.tables) == OF_PAPERS
    assert uncovered(read) == []


@pytest.mark.parametrize("name", sorted(published_tables(experiments_root())))
def test_a_published_table_is_whole(name):
    """A cell is empty, a value, or a value with its spread; its row has a name."""
    table = read_table(name, experiments_root())
    for key in ("paper", "item", "title", "measure", "spread", "reported"):
        assert table[key].strip(), key
    assert all(one.strip() for one in table["damaged"])
    for column in table["columns"]:
        scores = column.keys() - set(BESIDE_SCORES)
        assert scores and scores <= SCORE_COLUMNS.keys()
        assert cells(column) <= table["rows"].keys()
        for score in scores:
            for cell in column[score].values():
                assert len(cell) <= 2 and all(map(math.isfinite, cell))
    legible = any(
        cell
        for c in table["columns"]
        for s in c.keys() & SCORE_COLUMNS.keys()
        for cell in c[s].values()
    )
    assert legible or table["damaged"]


def test_cells_by_hand():
    """Four cells, looked up in the papers."""

    def cell(name, number, score, row):
        return read_table(name, experiments_root())["columns"][number][score][row]

    assert cell("fedtta/table1", 2, "novel-accuracy", "fedtta++") == [62.00, 0.11]
    assert cell("pfedhn/table1", 5, "train-test-accuracy", "pfedhn") == [53.24, 0.31]
    assert cell("odpfl_hn/table1", 6, "novel-accuracy", "odpfl-hn") == [32.9, 0.9]
    assert cell("fedembed/table2", 3, "train-f1", "fedembed assignment=type") == [0.77, 0.05]


def test_a_label_belongs_to_the_row_that_names_most_of_it():
    rows = ["tent", "fedembed assignment=som", "fedembed assignment=som heads=server"]
    assert row_of("tent lr=0.1", rows) == "tent"
    assert row_of("fedembed embedding-lr=0.1 assignment=som", rows) == rows[1]
    assert row_of("fedembed heads=server assignment=som", rows) == rows[2]
    assert row_of("fedembed assignment=type", rows) is None
    assert row_of("fedtta", rows) is None


def test_an_experiment_has_the_values_of_the_tables_that_it_names():
    """By its labels, without the settings that tell columns apart; empty cells are left out."""
    labels = [
        "fedavg num-clients=10 fraction-train=0.5",
        "fedavg num-clients=50 fraction-train=0.1",
    ]
    columns = published_columns("pfedhn/table1", labels, experiments_root())
    assert columns[0] == {
        "at": {"dataset": "cifar10", "num-clients": 10},
        "train-test-accuracy": {
            "fedavg fraction-train=0.5": 51.42,
            "fedavg fraction-train=0.1": 51.42,
        },
    }
    figure = published_columns("fedtta/figure3", ["tent", "fedtta"], experiments_root())
    assert figure[0]["novel-accuracy"] == {"fedtta": 75.40}
    with pytest.raises(ValueError, match="table 'fedtta/table9'; known: fedembed/table2"):
        published_columns("fedtta/table9", labels, experiments_root())
    asked = read_experiment("fedtta/table1-mnist")
    assert asked.tables == ("fedtta/table1",)
    mnist, *_ = Published.read(asked.settings, asked.published).columns
    assert (mnist["train-accuracy"]["fedavg"], mnist["novel-accuracy"]["fedtta++"]) == (
        95.06,
        98.66,
    )


def test_reasons_are_sentences(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("rounds = 3\n[reasons]\nrounds = 3\n")
    with pytest.raises(ValueError, match=r"\[reasons\] has rounds = 3; a reason is a sentence"):
        read_experiment(str(file))
    file.write_text('rounds = 3\n[reasons]\n"tent.lr" = "as fast"\n')
    assert read_experiment(str(file)).reasons == {"tent.lr": "as fast"}


MNIST = read_experiment("fedtta/table1-mnist")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"fedprox.lr": 0.1}, "lr of fedprox is 0.1; the paper has 0.3"),
        ({"fedprox.mu": 0.01}, "mu of fedprox is 0.01; the paper has 0.001"),
        ({"rounds": 300}, "is 300; the paper has 200"),
        ({"num-clients": 50}, "is 50; the paper has 100"),
        ({"local-clip-norm": 0.0}, "is 0.0; the authors' program has 10.0"),
        ({"max-examples-ratio": 3.0}, "is 3.0; the paper has 0.0"),
        ({"odpfl-hn.descriptor-dim": 0}, "descriptor-dim of odpfl-hn is 0; the paper has 32"),
        ({"momentum": 0.9}, "is 0.9; the paper is silent"),
        ({"fedadg.alignment": 0.5}, "alignment of fedadg is 0.5; the paper is silent"),
    ],
)
def test_a_value_that_is_not_the_papers_is_reported(settings, problem):
    assert problems_of(MNIST) == []
    changed = replace(MNIST, settings=MNIST.settings | settings)
    (line,) = problems_of(changed)
    assert problem in line
    key = next(iter(settings))
    assert problems_of(replace(changed, reasons=MNIST.reasons | {key: "for a reason"})) == []


def test_few_seeds_and_reasons_that_nothing_needs_are_reported():
    assert problems_of(replace(MNIST, seeds="0")) == [
        "fedtta/table1: seeds is 1 seeds; the paper has 3"
    ]
    lines = problems_of(replace(MNIST, reasons=MNIST.reasons | {"fedavg.lr": "none"}))
    assert lines == ["[reasons] has fedavg.lr, which needs none"]


def test_a_reason_for_all_methods_does_not_hold_where_the_paper_states_a_methods_value():
    """Table 4 has FedProx's rate; no table has the rounds of a method in particular."""
    changed = replace(MNIST, settings=MNIST.settings | {"fedprox.lr": 0.1})
    lines = problems_of(replace(changed, reasons=MNIST.reasons | {"lr": "for a reason"}))
    assert lines[0] == "fedtta/table1: lr of fedprox is 0.1; the paper has 0.3"
    changed = replace(MNIST, settings=MNIST.settings | {"rounds": 300})
    assert problems_of(replace(changed, reasons=MNIST.reasons | {"rounds": "for a reason"})) == []


def test_a_file_may_follow_the_text_alone():
    text = read_experiment("fedtta/table1-mnist-text")
    assert problems_of(text) == []
    without = {key: reason for key, reason in text.reasons.items() if key != "released"}
    lines = problems_of(replace(text, reasons=without))
    assert any("lr-decay" in line and "the authors' program has 0.99" in line for line in lines)


def test_a_choice_within_a_searched_grid_needs_its_reason_and_clients_a_round_count():
    asked = read_experiment("pfedhn/table4-spectral")
    assert problems_of(asked) == []
    (line,) = problems_of(replace(asked, settings=asked.settings | {"fraction-train": 0.02}))
    assert "fraction-train of pfedhn is 2 clients a round; the paper has 1" in line
    asked = read_experiment("odpfl_hn/table1-cifar10")
    assert "lr" in asked.reasons
    without = {key: reason for key, reason in asked.reasons.items() if key != "lr"}
    lines = problems_of(replace(asked, reasons=without))
    assert any("lr of fedavg" in line and "searched: 0.1, 0.05" in line for line in lines)


def test_a_row_or_a_column_that_is_missing_is_reported():
    read = {name: read_experiment(name) for name in OF_PAPERS}
    shift = read["fedtta/table2-shift"]
    few = replace(shift, methods=shift.methods.replace("scaffold,", ""))
    assert (
        uncovered(read | {"fedtta/table2-shift": few})[0] == "fedtta/table2, α = 0.01: no scaffold"
    )
    one = Experiment(
        shift.settings | {"partition.novel-alpha": 0.1}, {}, shift.methods, shift.seeds
    )
    lines = uncovered(read | {"fedtta/table2-shift": replace(one, tables=shift.tables)})
    assert len(lines) == 5 and lines[0] == "fedtta/table2, α = 0.01: no row"


def test_the_command_prints_problems(monkeypatch):
    assert check_published.all_problems(["fedtta/table1-mnist"]) == []
    wrong = replace(MNIST, settings=MNIST.settings | {"rounds": 7})
    monkeypatch.setattr(check_published, "read_experiment", lambda name: wrong)
    (line,) = check_published.all_problems(["mine"])
    assert line.startswith("mine: fedtta/table1: rounds of ")
