"""The Python API: runs, data frames, figures, a later client's model."""

import logging
import math

import numpy as np
import pandas
import pytest
import torch
from small_runs import invoke

import fedapps
from partitions.datasets.loading import absolute_paths

SMALL = {"num_clients": 4, "rounds": 2, "evaluate_every": 1, "local_steps": 1, "jobs": 1}
QUIET = {"engine": "in-process", "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def runs(folder):
    return fedapps.run(["fedavg", "tent"], [0, 1], output=folder, **SMALL, **QUIET)


def test_a_row_a_run_a_round_a_client(runs, folder):
    assert runs.names == ["fedavg-seed0", "fedavg-seed1", "tent-seed0", "tent-seed1"]
    frame = runs.to_pandas("num-clients", "tent.adapt-steps")
    assert list(frame.seed) == [0, 1, 0, 1] and set(frame["num-clients"]) == {4}
    rounds, clients = runs.rounds(), runs.clients("last")
    assert len(rounds) == 4 * 2 and len(clients) == 4 * 4
    assert list(rounds["round"]) == [1, 2] * 4
    last = rounds[rounds["round"] == 2].set_index(["method", "seed"])["novel-accuracy"]
    novel = clients[clients.role == "novel"].groupby(["method", "seed"]).accuracy.mean()
    pandas.testing.assert_series_equal(last.sort_index(), novel.sort_index(), check_names=False)
    again = fedapps.read(folder)
    assert again.names == runs.names and not again.problems
    assert math.isclose(again.to_pandas()["last novel-accuracy"][3], last["tent", 1])


def test_tables_and_figures(runs):
    assert list(runs.table().index) == ["fedavg", "tent"]
    assert "novel clients" in repr(runs) and "<table" in runs._repr_html_()
    labels = {line.get_label() for axis in runs.plot("curves").axes for line in axis.lines}
    assert {"fedavg", "tent"} <= labels
    with pytest.raises(
        ValueError, match="unknown figure 'pie'; known: curves, time, clients, decisions, swept"
    ):
        runs.plot("pie")
    with pytest.raises(ValueError, match="unknown round 'foo'; known: best, last"):
        runs.clients("foo")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """It was a folder named ~, which a user may remove with all that the shell calls so."""
    monkeypatch.setattr("fedapps.api.write_report", lambda *_: None)  # fonts are kept in a home
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    small = SMALL | {"rounds": 1}
    fedapps.run("fedavg", output="~/runs", **small, **QUIET)
    model = fedapps.load("~/runs/fedavg-seed0").personalize(torch.rand(4, 1, 8, 8))
    model.save("~/mine")
    saved = tmp_path / "home" / "runs"
    np.save(tmp_path / "home" / "x.npy", np.zeros((3, 8, 8), np.uint8))
    invoke("run", "--from", saved, "--output=~/more", "--engine", "in-process")
    assert fedapps.read("~/runs").names == ["fedavg-seed0"]
    with pytest.raises(ValueError, match=f"{tmp_path}/home/mine .*go on"):
        fedapps.load_personal("~/mine")
    assert {"runs", "more", "mine"} <= {path.name for path in (tmp_path / "home").iterdir()}
    assert "fedavg-seed0: finished" in invoke("status", "~/runs").output
    invoke("personalize", "~/runs/fedavg-seed0", "~/x.npy", "--output=~/yours")
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize(
    "names",
    [{"dataset": "~/data/x.npz"}, {"dataset": "x.npz", "data-dir": "~/data"}, {"dataset": "x.npz"}],
)
def test_a_tilde_in_the_names_of_data_is_the_home_folder(names, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDAPPS_DATA_DIR", "~/data")
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "x.npz"
    file.touch()
    found = absolute_paths({"data-dir": ""} | names)
    assert found["dataset"] == str(file)
    names["partition.novel-dataset"] = names["dataset"]  # engines look for it elsewhere, too
    assert absolute_paths({"data-dir": ""} | names) == found | {
        "partition.novel-dataset": str(file)
    }


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (lambda runs: runs.to_pandas("lrr"), ValueError, "no run has a setting 'lrr'.* mean lr"),
        (lambda runs: runs.plot("curves", by="lr"), ValueError, "by is 'lr', but is for .swept."),
        (lambda runs: runs.plot("swept"), ValueError, 'as by="partition.alpha"'),
        (lambda runs: runs[4], IndexError, "no run 4; there are 4, counted from 0"),
        (lambda runs: runs[-5], IndexError, "no run -5"),
        (lambda runs: runs[:2], TypeError, "slice"),
    ],
)
def test_what_runs_do_not_have_is_refused(call, error, why, runs):
    """A misspelt setting was a column of None."""
    with pytest.raises(error, match=why):
        call(runs)
    assert runs[-1].folder == runs["tent-seed1"].folder


def test_a_later_client_gets_its_model(runs):
    model = runs["tent-seed1"].personalize(torch.rand(12, 1, 8, 8))
    assert model(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    with pytest.raises(KeyError, match="no run 'tent'; there are fedavg-seed0"):
        runs["tent"]


def test_finished_runs_are_kept_and_values_span_a_grid(runs, folder, tmp_path):
    before = (folder / "fedavg-seed0" / "summary.json").stat().st_mtime_ns
    more = fedapps.run("fedavg", 0, output=folder, **SMALL, **QUIET)
    assert more.names == ["fedavg-seed0"]
    assert (folder / "fedavg-seed0" / "summary.json").stat().st_mtime_ns == before
    key = "partition.classes-per-client"
    both = fedapps.run("fedavg", 0, output=tmp_path, settings={key: (1, 2)}, **SMALL, **QUIET)
    assert list(both.to_pandas(key)[key]) == [1, 2]


def test_errors_are_exceptions(tmp_path):
    for wrong, why in (
        ({"methods": "fedpr"}, "unknown method 'fedpr'"),
        ({"methods": "fedavg", "num_client": 4}, "num-clients"),
        ({"methods": "fedavg", "lr": "fast"}, "lr"),
        ({"methods": "fedavg", "engine": "spark"}, "spark"),
    ):
        with pytest.raises(ValueError, match=why):
            fedapps.run(**wrong, output=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="holds no runs"):
        fedapps.read(tmp_path)


def trained(*_, **__):
    raise AssertionError("something was trained")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"methods": "fedavg", "lr": []}, "lr"),
        ({"method": "tent"}, "method is 'tent', but is no setting here; give run methods="),
        ({"methods": "fedavg", "settings": {"method": "tent"}}, "method is 'tent', but is no"),
        (
            {"methods": "fedavg", "output_dir": "there"},
            "output-dir is 'there', .* give run output=",
        ),
        ({"methods": "fedavg", "seeds": [0, 1], "seed": 3}, "seeds are 0,1, but seed is 3 as well"),
        ({"experiment": "unseen/digits"}, "'unseen/digits' includes others.*unseen/iid, unseen/st"),
        ({"experiment": "unseen/digits", "methods": "fedavg"}, "'unseen/digits' includes others"),
    ],
)
def test_nothing_that_was_asked_for_is_dropped(wrong, why, tmp_path, monkeypatch):
    monkeypatch.setattr("fedapps.api.engines.run_jobs", trained)
    with pytest.raises(ValueError, match=why):
        fedapps.run(**wrong, output=tmp_path, **SMALL, **QUIET)
    assert not list(tmp_path.iterdir())


def test_a_seed_is_a_keyword_as_well(tmp_path, monkeypatch):
    """Also where an experiment names others, and for several."""
    made = []
    monkeypatch.setattr("fedapps.api.engines.run_jobs", lambda work, *_, **__: made.extend(work))
    monkeypatch.setattr("fedapps.api.read_runs", lambda _: (pandas.DataFrame({"name": []}), []))
    monkeypatch.setattr("fedapps.api.write_report", lambda *_: None)
    file = tmp_path / "asked.toml"
    file.write_text('methods = ["fedavg"]\nseeds = [0, 1]\n')
    for asked in ({"methods": "tent", "seed": 3}, {"experiment": str(file), "seed": [4, 5]}):
        fedapps.run(**asked, output=tmp_path / "out", **SMALL, **QUIET)
    assert [(job.name, job.config["seed"]) for job in made] == [
        ("tent-seed3", 3),
        ("fedavg-seed4", 4),
        ("fedavg-seed5", 5),
    ]


def test_flowers_log_is_quiet_and_its_level_kept(tmp_path, monkeypatch, caplog):
    log = logging.getLogger("flwr")
    log.setLevel(logging.INFO)
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    fedapps.run("fedavg", 0, output=tmp_path, **SMALL, **QUIET)
    assert not caplog.records and log.level == logging.INFO


def test_a_run_that_never_began_raises_with_its_reason(tmp_path, monkeypatch):
    """Then the folder holds no run."""

    def broken(jobs, *args, **options):
        for job in jobs:
            job.error = "its process ended"

    monkeypatch.setattr("fedapps.api.engines.run_jobs", broken)
    with pytest.raises(RuntimeError, match="fedavg-seed0: its process ended"):
        fedapps.run(["fedavg"], 0, output=tmp_path, **SMALL, **QUIET)


def test_a_failed_run_raises_and_the_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("clients.methods.tent.TENTClient.predict", None)
    with pytest.raises(RuntimeError, match="tent-seed0: "):
        fedapps.run(["fedavg", "tent"], 0, output=tmp_path, **SMALL, **QUIET)
    assert fedapps.read(tmp_path).names[0] == "fedavg-seed0"
