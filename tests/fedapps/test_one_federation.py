"""A command says which federation it means, and tables tell apart the runs of several."""

import json
import re

import pytest
from run_folders import leave
from small_runs import invoke

from fedapps.planning import plan, read_request
from fedapps.results.comparison import as_table, compare
from fedapps.results.plot import curves
from fedapps.results.runs import read_runs
from fedapps.results.table import results
from fedapps.settings.experiments import main_job

SMALL = ["num-clients=4", "rounds=2", "local-steps=1", "evaluate-every=1", "--engine", "in-process"]
OLD = {"num-clients": 20, "rounds": 30}


def jobs(folder, *arguments, methods=""):
    return plan(read_request([*arguments], methods, "", None), folder, None, False, False)


def test_chosen_methods_run_in_the_main_jobs_federation(tmp_path):
    """What is typed wins. The job of a method is the same with and without its name."""
    main = main_job().settings
    (ditto,) = jobs(tmp_path, "rounds=7", "lr=0.1", methods="ditto")
    expected = main | {"rounds": 7, "lr": 0.1, "pfedhn.lr": 0.1, "method": "ditto"}
    assert {key: ditto.config[key] for key in expected} == expected
    (chosen,) = jobs(tmp_path, methods="pfedhn")
    (whole,) = [job for job in jobs(tmp_path) if job.method == "pfedhn"]
    assert chosen == whole and chosen.config["pfedhn.lr"] == 0.05


def test_an_experiment_changes_the_main_job_if_it_names_no_methods(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("lr = 0.1\n")
    (job,) = jobs(tmp_path, str(file), methods="fedavg")
    assert (job.config["lr"], job.config["num-clients"], job.config["local-steps"]) == (0.1, 50, 5)
    file.write_text('lr = 0.1\nmethods = ["tent"]\n')
    (job,) = jobs(tmp_path, str(file), methods="fedavg")
    assert (job.config["lr"], job.config["num-clients"], job.config["local-steps"]) == (0.1, 20, 20)


def test_the_federation_is_printed_before_a_run_and_a_dry_run_writes_nothing(tmp_path):
    """FedAvg is finished; of TENT an estimate is printed, and neither begins."""
    said = invoke("run", *SMALL, "--methods", "fedavg", "--output", tmp_path).output
    line = "dataset=digits partition=pathological num-clients=4 train-fraction=0.5 rounds=2"
    assert said.index(line) < said.index("fedavg-seed0")
    news = r"fedavg-seed0  round (\d)/2  loss \d\.\d{3}  training [\d.]+ %  novel [\d.]+ %\n"
    assert re.findall(news, said) == ["1", "2"]
    before = sorted(tmp_path.rglob("*"))
    more = ["--methods", "fedavg,tent,auto", "auto.alpha=0.5", "--dry-run", "--output", tmp_path]
    said = invoke("run", *SMALL, "lr=0.3", *more).output
    note = "auto: candidates none, mean-matching; bn16 needs batch normalisation, which mlp lacks"
    assert note in " ".join(said.split())
    assert re.search(r"fedavg-seed0 │ +finished │ +2 │ +– │", said)
    assert re.search(r"tent-seed0 │ +new │ +2 │ 0:00:\d\d │ +\d\.\d GiB", said)
    assert "rounds=2" in said and "factor of 2" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_of_two_federations_are_told_apart(tmp_path):
    """Columns say what differs; nothing is compared across, and a title names what is common."""
    for seed in (0, 1):
        leave(tmp_path, "fedavg", seed, [0.2, 0.4], curve=(0.5,), **OLD)
    leave(tmp_path, "fedprox", 0, [0.3, 0.4], curve=(0.5,), **OLD, **{"tent.adapt-steps": 3})
    leave(tmp_path, "ditto", 0, [0.5, 0.7], curve=(0.5,), **{"num-clients": 50, "rounds": 60})
    runs = read_runs(tmp_path)[0]
    shown = as_table(compared := compare(runs, against="fedavg"))
    assert compared.by == ["method", "num-clients", "rounds"]
    novel = [dict(zip(shown.columns, row, strict=True)) for row in shown.rows if "novel" in row[0]]
    found = {
        row["method"]: (row["num-clients"], row["rounds"], row["less fedavg"]) for row in novel
    }
    assert found == {
        "fedavg": ("20", "30", "–"),
        "fedprox": ("20", "30", "+5.00"),
        "ditto": ("50", "60", "–"),
    }
    assert shown.title == "digits, pathological, best round"
    last = results(runs)
    assert last.columns[:2] == ["method", "num-clients"] and last.columns.count("rounds") == 1
    assert [row[:2] for row in last.rows] == [["ditto", "50"], ["fedavg", "20"], ["fedprox", "20"]]
    labels = [text.get_text() for text in curves(runs).legends[0].get_texts()]
    assert "ditto num-clients=50 rounds=60" in labels


def test_seeds_under_other_settings_are_not_averaged(tmp_path):
    """Of a method's own section; those of other methods and of where a run is do not count."""
    leave(tmp_path, "tent", 0, [0.2], **{"tent.adapt-steps": 5})
    leave(tmp_path, "tent", 1, [0.4])
    leave(tmp_path, "fedavg", 0, [0.2], **{"tent.adapt-steps": 5, "data-dir": "/a"})
    leave(tmp_path, "fedavg", 1, [0.4], **{"partition.alpha": 7.0, "device": "cpu"})
    runs = read_runs(tmp_path)[0]
    assert list(runs.method) == ["fedavg", "fedavg", "tent adapt-steps=5", "tent adapt-steps=10"]
    with pytest.raises(ValueError, match="add to --by method or what differs"):
        compare(runs.iloc[[0, 2]].assign(seed=[0, 1]), by=["model"])


def test_rows_keep_the_order_that_was_asked_for_and_the_report_has_all_runs(tmp_path):
    """Two commands; the reference is the first run of the first one."""
    invoke("run", *SMALL, "--methods", "tent,local", "--output", tmp_path)
    said = invoke("run", *SMALL, "--methods", "fedavg", "--output", tmp_path).output
    assert "report of all 3 runs" in said and "│ local │" not in said
    page = (tmp_path / "report.html").read_text("utf-8")
    table = page[page.index('<section id="results">') :].partition("</table>")[0]
    assert re.findall(r"<tr><td>(.*?)</td>", table) == ["tent", "local", "fedavg"]
    assert "less tent" in invoke("table", tmp_path, "--format", "markdown").output
    # a run that failed without any file is named as well
    (tmp_path / "local-seed0" / "summary.json").write_text(json.dumps({"finished": False}))
    assert list(read_runs(tmp_path)[0].method) == ["tent", "fedavg"]
