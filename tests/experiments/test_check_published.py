"""The papers' tables as data, and the experiments that must have what they state."""

import math
import re
from dataclasses import replace

import pytest

from experiments import check_published
from experiments.check_published import (
    Check,
    of_method,
    papers,
    problems_of,
    runs_of,
    uncovered,
)
from fedapps.results.published import SCORE_COLUMNS, Published
from fedapps.settings.config import effective
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
PAPERS = papers()
IN_PAPERS_FOLDERS = sorted(name for name in experiments() if name.partition("/")[0] in PAPERS)


@pytest.mark.parametrize("name", IN_PAPERS_FOLDERS)
def test_every_setting_of_an_experiment_is_the_papers_or_has_its_reason(name):
    assert problems_of(read_experiment(name), paper=name.partition("/")[0]) == []


def test_an_experiment_of_a_papers_folder_without_a_table_limits_no_client():
    asked = read_experiment("odpfl_hn/two-phase")
    changed = replace(asked, settings=asked.settings | {"selection-mean": "trimmed"})
    (line,) = problems_of(changed, paper="odpfl_hn")
    assert line == "selection-mean of odpfl-hn is trimmed; the paper has plain"
    assert problems_of(changed, paper="unseen") == []
    explained = replace(changed, reasons={"selection-mean": "for a reason"})
    assert problems_of(explained, paper="odpfl_hn") == []
    lines = problems_of(replace(asked, reasons={"selection-mean": "none"}), paper="odpfl_hn")
    assert lines == ["[reasons] has selection-mean, which needs none"]


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


# Of each table, compared with the papers' text: the number of values and spreads, and their sum,
# each times its place.
TOTALS = {
    "fedembed/table2": (72, 794.5),
    "fedembed/table3": (72, 694.1),
    "fedembed/table4": (144, 3323.53),
    "fedembed/table5": (108, 1611.38),
    "fedtta/figure3": (6, 1685.57),
    "fedtta/figure4": (4, 444.49),
    "fedtta/figure5": (0, 0),
    "fedtta/table1": (280, 1303795.86),
    "fedtta/table2": (168, 988798.95),
    "odpfl_hn/figure3a": (0, 0),
    "odpfl_hn/figure3b": (0, 0),
    "odpfl_hn/figure4": (0, 0),
    "odpfl_hn/section6-8": (14, 1584.4),
    "odpfl_hn/table1": (112, 89050.9),
    "odpfl_hn/table2": (56, 22813.5),
    "pfedhn/appendix-c5": (4, 338.68),
    "pfedhn/figure2": (0, 0),
    "pfedhn/figure3": (0, 0),
    "pfedhn/figure4": (0, 0),
    "pfedhn/figure5": (0, 0),
    "pfedhn/figure6a": (0, 0),
    "pfedhn/figure6b": (2, 265.22),
    "pfedhn/table1": (112, 185827.77),
    "pfedhn/table2": (62, 44909.68),
    "pfedhn/table3": (24, 14230.7),
    "pfedhn/table4": (6, 794.6),
}


@pytest.mark.parametrize("name", sorted(published_tables(experiments_root())))
def test_the_values_of_a_table_add_up(name):
    """A wrong digit and two exchanged values change the sum."""
    numbers: list[float] = []
    for column in read_table(name, experiments_root())["columns"]:
        for key in sorted(column.keys() & {*SCORE_COLUMNS, "group"}):
            for _, cell in sorted(column[key].items()):
                numbers += cell
    total = sum(place * number for place, number in enumerate(numbers, start=1))
    assert (len(numbers), round(total, 2)) == TOTALS[name]


# What a paper says of all its experiments.
OF_ALL_TABLES = {
    "fedtta": {
        "train-fraction": 0.5,
        "partition.validation-fraction": 0.15,  # "a ratio of 85:15"
        "fraction-train": 1.0,  # "all clients participate"
        "local-steps": 20,
        "batch-size": 64,
    },
    "odpfl_hn": {
        "train-fraction": 0.9,  # "N/10" are novel
        "partition.validation-fraction": 0.15,  # "85% / 15%"
        "fraction-train": 0.1,
        "rounds": 500,
    },
    "pfedhn": {"average-over": "clients"},  # "federated accuracy"
    "fedembed": {
        "partition.samples-per-user": 30,
        "partition.test-per-user": 10,
        "lr": 0.001,  # "Adam with PyTorch's default parameters"
    },
}
# What FedTTA says of a method on all datasets.
OF_ALL_FEDTTA = {
    "fedadg": {"noise-dim": 10},
    "fedsr": {"l2r": 0.01, "cmi": 0.0005},
    "pfl-sampled": {"base": "fedper"},
    "pfl-ensemble": {"base": "fedper"},
    "odpfl-hn": {"descriptor-dim": 32},
    "fedtta": {"adaptation-width": 32, "max-steps": 1, "mu": 0.0},
    "fedtta-prox": {"adaptation-width": 32, "max-steps": 1},
    "fedtta++": {"adaptation-width": 32, "max-steps": 50},
}


@pytest.mark.parametrize("name", sorted(published_tables(experiments_root())))
def test_a_table_states_what_its_paper_says_of_all_experiments(name):
    """A setting that a table leaves out is not compared with the experiments."""
    table = read_table(name, experiments_root())
    if "settings" not in table:  # FedEmbed's tables by prevalence are of runs of its others
        assert table["without-experiment"]
        return
    paper = name.partition("/")[0]
    stated = table["settings"]
    expected = OF_ALL_TABLES[paper]
    assert {key: stated.get(key) for key in expected} == expected
    for method in table["rows"].keys() & OF_ALL_FEDTTA.keys():
        if paper == "fedtta":
            expected = OF_ALL_FEDTTA[method]
            assert {key: stated[method].get(key) for key in expected} == expected, method


def values_of(runs, method, key):
    """The values that the runs of a method have for a key."""
    return {effective(run.config, key) for run in runs if run.method == method}


@pytest.mark.parametrize("name", OF_PAPERS)
def test_a_reason_that_names_a_source_agrees_with_it(name):
    """A file that chose a value tries others, too. "Table 4" is FedTTA's, for MNIST. What is said
    to be within a grid is."""
    asked = read_experiment(name)
    check = Check(asked, asked.tables[0])
    keys_set = [set(check.set_for(run)) for run in check.runs]
    mnist, *_ = read_table("fedtta/table1", experiments_root())["columns"]
    grids = [read_table(table, experiments_root()).get("grids", {}) for table in asked.tables]
    for reason_key, reason in asked.reasons.items():
        search = re.search(r"(?:samples \(|: by )([\w-]+)\.toml", reason)
        for method in {run.method for run in check.runs}:
            key = reason_key.removeprefix(f"{method}.")
            runs = [run for run, keys in zip(check.runs, keys_set, strict=True) if key in keys]
            values = values_of(runs, method, key)
            if not values:
                continue
            if search:
                searching = read_experiment(f"{name.partition('/')[0]}/{search[1]}")
                assert values_of(runs_of(searching), method, key) > values, (method, key)
            if "those of Table 4 for MNIST" in reason:
                assert values == {mnist["settings"][method].get(key)}, (method, key)
            if reason.startswith("within the grid"):
                for grid in grids:
                    searched = of_method(method, grid).get(key)
                    assert searched is None or values <= set(searched), (method, key)


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
