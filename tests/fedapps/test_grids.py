"""Grids: several values of a key make every combination a run with a name that tells it."""

import tomllib

import pytest
from small_runs import invoke

from fedapps.results.runs import read_runs
from fedapps.settings.experiments import Experiment, parse_experiment, read_experiment
from fedapps.settings.variants import combinations

SMALL = ["num-clients=4", "rounds=1", "local-steps=1", "--engine", "in-process"]


def test_every_combination_is_a_run_that_is_configured_as_its_name_says(tmp_path):
    """pfedhn has a learning rate of its own and fedavg the common one; clip-norm is pfedhn's."""
    swept = ["lr=0.05,0.2", "partition.classes-per-client=2,3", "pfedhn.clip-norm=7.5,9"]
    swept += ["pfedhn.hidden-dim=8", "--methods", "fedavg,pfedhn", "--seeds", "1,2"]
    invoke("run", *SMALL, *swept, "--output", tmp_path)
    fedavg = tmp_path / "fedavg,lr=0.2,partition.classes-per-client=3-seed2"
    config = tomllib.loads((fedavg / "config.toml").read_text())
    assert (config["lr"], config["partition.classes-per-client"], config["seed"]) == (0.2, 3, 2)
    pfedhn = "pfedhn lr=0.05 partition.classes-per-client=2 clip-norm=9"
    config = tomllib.loads((tmp_path / f"{pfedhn.replace(' ', ',')}-seed1/config.toml").read_text())
    assert (config["pfedhn.lr"], config["lr"], config["pfedhn.clip-norm"]) == (0.05, 0.3, 9.0)
    runs = read_runs(tmp_path)[0]
    assert len(runs) == 2 * (2 * 2) + 2 * (2 * 2 * 2)  # seeds × combinations, of either method
    assert pfedhn in set(runs.method)
    assert all(summary.finished for summary in runs.summary)


def test_what_an_argument_says():
    """A quoted text, and a setting whose text is a list, are one value."""
    words = [
        "lr=0.1,1",
        "partition.angles=0,30",
        'data-dir="a,b"',
        "report-generalization-bound=true,false",
    ]
    asked = parse_experiment([*words, "seed=3,4", "methods=fedavg,tent"])
    assert asked.grid == {"lr": [0.1, 1], "report-generalization-bound": [True, False]}
    assert asked.settings == {"partition.angles": "0,30", "data-dir": "a,b"}
    assert (asked.seeds, asked.methods) == ("3,4", "fedavg,tent")
    assert parse_experiment(["seeds=0,1"]).seeds == "0,1"


def test_a_list_in_a_file_spans_a_grid_that_an_argument_replaces(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('methods = ["tent"]\nlr = [0.1, 0.2]\nrounds = 5\n[tent]\nadapt-steps = [1, 3]')
    asked = read_experiment(str(file))
    assert asked.grid == {"lr": [0.1, 0.2], "tent.adapt-steps": [1, 3]}
    later = asked | parse_experiment(["lr=0.7", "rounds=5,6"])
    grid = {"tent.adapt-steps": [1, 3], "rounds": [5, 6]}
    assert later == Experiment({"lr": 0.7}, grid, "tent", source=file.read_text())


@pytest.mark.parametrize(
    ("methods", "grid", "words"),
    [
        (["tent"], {"pfedhn.lr": [0.1, 0.2]}, ["pfedhn.lr", "tent"]),
        (["tent lr=0.1"], {"lr": [0.1, 0.2]}, ["'tent lr=0.1'", "swept"]),
        (["tent"], {"data-dir": ["/a", "b"]}, ["'/a'", "folder"]),
        (["tent"], {"model": ["mlp", ""]}, ["model=''", "folder"]),
    ],
)
def test_a_grid_that_cannot_be_is_refused(methods, grid, words):
    with pytest.raises(ValueError) as error:
        combinations(methods, grid)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("argument", ["rates=1,2", "rounds=1,2.5", "lr=0.1,fast"])
def test_unknown_keys_and_wrong_types_are_refused_before_a_run(argument, tmp_path):
    done = invoke("run", *SMALL, argument, "--output", tmp_path / "out", code=2)
    assert argument.partition("=")[0] in done.output
    assert not (tmp_path / "out").exists()
