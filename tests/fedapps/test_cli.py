"""The command: bad input is refused before a run starts, results and lists are what they say."""

import gc
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from small_runs import fedapps, forked_workers
from typer.testing import CliRunner

from fedapps.commands.list import LISTS
from fedapps.commands.main import cli
from fedapps.engines import job_pool
from fedapps.methods import METHODS
from fedapps.settings.config import defaults

SUMMARY_KEYS = {
    "method", "dataset", "partition", "model", "seed", "engine", "rounds", "best_round",
    "evaluation", "last", "per_client", "megabytes_per_client_round", "seconds", "dropped_replies",
}  # fmt: skip
SMALL = ["num-clients=6", "rounds=2", "local-steps=3", "--engine", "in-process"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "fedpr"], ["'fedpr'", "fedper"]),
        (["dataset=cifar"], ["'cifar'", "digits"]),
        (["partition=random"], ["'random'", "pathological"]),
        (["model=resnet"], ["'resnet'", "mlp"]),
        (["rates=3"], ["'rates'", "lr"]),
        (["--methods", "tent steps=3"], ["'tent.steps'", "adapt-steps"]),
        (["--methods", "tent adapt-steps=0.5"], ["tent.adapt-steps", "0.5", "whole"]),
        (["--methods", "tent adapt-steps"], ["'adapt-steps'", "key=value"]),
        (["--methods", "local data-dir=/tmp"], ["data-dir=/tmp", "/"]),
        (["pfedhn.depth=3"], ["'pfedhn.depth'", "hidden-layers"]),
        (["partition=dirichlet", "partition.alpha=0"], ["alpha", "0.0", "(0, "]),
        (["num-clients=5000"], ["5000", "1797"]),
        (["model=lenet"], ["'lenet'", "16×16", "(1, 8, 8)", "'mlp'"]),
        (["rounds=0"], ["rounds is 0"]),
        (["--engine", "spark"], ["'spark'", "in-process"]),
        (["--engine", "ray", "--jobs", "2", "--seeds", "0,1"], ["ray gives all cores", "--jobs"]),
        (["--engine", "ray", "stacked-clients=4"], ["cohort", "in-process", "not ray"]),
        (["--seeds", "a"], ["'a'"]),
        (["--jobs", "0"], ["--jobs is 0"]),
        (
            ["--engine", "in-process", "--ray-address", "auto"],
            ["--ray-address", "--engine ray", "in-process"],
        ),
        (
            ["--engine", "in-process", "--gpus-per-client", "0.5"],
            ["--gpus-per-client is for --engine ray or flower"],
        ),
        (["--methods", "fedavg", "method=tent"], ["--methods", "'fedavg'", "method=tent"]),
        (["--seeds", "1", "seeds=2"], ["--seeds", "'1'", "seeds=2"]),
        (["method=tent", "methods=fedavg"], ["method", "methods", "one of the two"]),
        (["--engine", "ray", "--ray-address", "127.0.0.1:1"], ["'127.0.0.1:1'", "host:port"]),
        (["--engine", "ray", "--ray-address", "head"], ["'head'", "host:port"]),
        (["--engine", "ray", "--ray-address", "127.0.0.1:99999"], ["99999", "host:port"]),
        (["nothing.toml"], ["nothing.toml"]),
        (["nonsense"], ["'nonsense'", "key=value"]),
        (["fedprox.mu=-1", "--methods", "fedprox"], ["fedprox.mu", "-1"]),
        (["device=tpu"], ["'tpu'", "auto"]),
        (["model=os:curdir"], ["'os:curdir'", "must be a subclass of torch.nn.Module"]),
        ([f"dataset={__file__}"], ["test_cli.py is no data", ".npz"]),
    ],
)
def test_bad_input_names_value_and_choices(arguments, words, tmp_path):
    said = fedapps("run", *arguments, "--output", tmp_path / "out", code=2)
    assert all(word in said for word in words), said
    assert not (tmp_path / "out").exists()


def test_a_truncated_data_file_is_refused(tmp_path):
    (tmp_path / "mnist").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / "mnist" / f"{name}-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x09abc")
    said = fedapps("run", "dataset=mnist", f"data-dir={tmp_path}", code=2)
    assert "train-images-idx3-ubyte is truncated" in said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_results_in_their_folders(tmp_path, monkeypatch):
    """Two methods with two seeds, two runs side by side. The best round is the one with the best
    validation accuracy."""
    monkeypatch.setattr(job_pool, "_start_worker", forked_workers())
    arguments = ["rounds=4", "evaluate-every=1", "--seeds", "0,1", "--jobs", 2]
    said = fedapps("run", *SMALL, *arguments, "--methods", "tent,fedper", "--output", tmp_path)
    assert "cannot without labels" in said and "± standard deviation over seeds" in said
    trained = set()
    for method in ("tent", "fedper"):
        for seed in (0, 1):
            folder = tmp_path / f"{method}-seed{seed}"
            summary = json.loads((folder / "summary.json").read_text())
            trained.add(summary["evaluation"]["train-loss"])
            assert summary.keys() >= SUMMARY_KEYS
            assert (summary["rounds"], summary["evaluation"]["train-clients"]) == (4, 3)
            roles = [client["role"] for client in summary["per_client"].values()]
            assert roles.count("train") == 3
            lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
            assert [line["round"] for line in lines] == [1, 2, 3, 4]
            validation = [line["evaluation"]["train-accuracy"] for line in lines]
            best = validation.index(max(validation))
            assert summary["best_round"] == best + 1
            assert summary["last"]["evaluation"]["train-accuracy"] == validation[-1]
            accuracy = lines[best]["evaluation"].get("novel-accuracy")
            assert summary["evaluation"].get("novel-accuracy") == accuracy
            assert (accuracy is None) == (method == "fedper")
            config = tomllib.loads((folder / "config.toml").read_text())
            assert config["method"] == method and defaults().keys() <= config.keys()
            assert config["versions"].keys() >= {"flwr", "torch", "python"}
    assert len(trained) == 4


def test_a_method_with_settings_of_its_own(tmp_path):
    """A method's keys win over common ones; --from finds each variant's folder."""
    labels = ["tent", "tent adapt-steps=0", "tent adapt-steps=0 lr=0.5"]
    said = fedapps("run", *SMALL, "--methods", ",".join(labels), "--output", tmp_path)
    own = {}
    for label in labels:
        assert f"│ {label} │" in said
        folder = tmp_path / f"{label.replace(' ', ',')}-seed0"
        config = tomllib.loads((folder / "config.toml").read_text())
        own[label] = (config["method"], config["tent.adapt-steps"], config["lr"])
    assert list(own.values()) == [("tent", 10, 0.3), ("tent", 0, 0.3), ("tent", 0, 0.5)]
    page = fedapps("report", tmp_path) and (tmp_path / "report.html").read_text("utf-8")
    assert all(f"<td>{label}</td>" in page for label in labels)
    assert "<td>local-steps</td><td>3</td>" in page
    assert "<td>lr</td>" not in page  # not the same in all runs
    again = fedapps("run", "--from", tmp_path, *SMALL[-2:], "--output", tmp_path / "later")
    assert all(f"│ {label} │" in again for label in labels)
    for label, expected in own.items():
        folder = tmp_path / "later" / f"{label.replace(' ', ',')}-seed0"
        config = tomllib.loads((folder / "config.toml").read_text())
        assert (config["method"], config["tent.adapt-steps"], config["lr"]) == expected


def test_an_experiment_gives_what_differs(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '# Mine\nmethods = ["local", "fedavg"]\nseeds = [4]\nnum-clients = 6\nrounds = 1\n'
        'local-steps = 2\n"partition.classes-per-client" = 3\n[fedavg]\nlr = 0.2\n'
    )
    # fedavg declares no lr of its own, so this must be refused
    assert "'fedavg.lr'" in fedapps("run", file, "--engine", "in-process", code=2)
    file.write_text(file.read_text().replace("[fedavg]\nlr = 0.2\n", "[tent]\nadapt-steps = 2\n"))
    fedapps("run", file, "--engine", "in-process", "--output", tmp_path / "out", drawn=True)
    names = {folder.name for folder in (tmp_path / "out").iterdir()}
    beside = {"report.html", "experiment.toml", "runs.txt", "commands.txt", ".gitignore"}
    assert names == {"local-seed4", "fedavg-seed4", *beside}
    said = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC: fedapps run \S+mine\.toml --engine in-process --output"
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert re.search(said, page)
    assert page.count("<svg") == 2  # curves and clients


STARTS = """
import json, os, sys
from click.testing import CliRunner
from typer.main import get_command
from fedapps.commands.main import cli

command = get_command(cli)
for arguments in json.loads(sys.argv[1]):
    if os.fork() == 0:
        result = CliRunner().invoke(command, arguments)
        loaded = {"torch", "flwr", "ray"} & sys.modules.keys()
        print(json.dumps([arguments, result.exit_code, sorted(loaded)]), flush=True)
        os._exit(0)
    os.wait()
"""
COMMANDS = ("", "run", "report", "table", "plot", "tune", "data", "partition show", "show",
            "personalize", "serve", "deploy", "push", "list")  # fmt: skip
REFUSED = """list colours; run --nonsense; run --engine spark; run --jobs 0; run --seeds a;
    run --gpus-per-client 65; run --resume x lr=1; run a.toml b.toml; run --ray-address head;
    run lr; run lr=-1; run rates=3; run --methods fedpr; run dataset=cifar;
    run partition=random; run model=resnet; show nowhere; push nowhere a/b; serve nowhere;
    deploy nowhere; tune x --trials 0; tune x --engine spark"""


def test_help_and_refusals_load_neither_torch_nor_flower_nor_ray():
    expected = [[f"{words} --help".split(), 0, []] for words in COMMANDS]
    expected += [[words.split(), 2, []] for words in REFUSED.split(";")]
    asked = [arguments for arguments, *_ in expected]
    command = [sys.executable, "-c", STARTS, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


@pytest.mark.parametrize("what", LISTS)
def test_lists_are_tables_and_json(what):
    rows = json.loads(fedapps("list", what, "--json"))
    assert all("name" in row for row in rows)
    if what == "methods":
        assert [row["name"] for row in rows] == list(METHODS)
    fedapps("list", what)
    assert what in fedapps("list", "colours", code=2)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("run fedtta/table1-m", {"fedtta/table1-mnist", "fedtta/table1-mnist-text"}),
        ("run batch-", {"batch-size=", "batch-draws="}),
        ("run dataset=cifar1", {"dataset=cifar10", "dataset=cifar100"}),
        ("run standardize=ch", {"standardize=channels"}),
        ("run --methods fedavg,fedb", {"fedavg,fedbn", "fedavg,fedbabu"}),
        ("run --engine r", {"ray"}),
        ("list p", {"partitions"}),
        ("tune fedembed/map fedtta.inner-l", {"fedtta.inner-lr=", "fedtta.inner-loss="}),
    ],
)
def test_the_shell_completes_what_a_user_types(typed, offered):
    words = {"_FEDAPPS_COMPLETE": "complete_bash", "COMP_WORDS": f"fedapps {typed}"}
    words["COMP_CWORD"] = str(len(typed.split()))
    done = CliRunner().invoke(cli, [], env=words, prog_name="fedapps")
    assert set(done.output.split()) == offered


def test_methods_are_listed_by_family():
    listed = json.loads(fedapps("list", "methods", "--family", "test-time", "--json"))
    names = {row["name"] for row in listed}
    assert names == {name for name, entry in METHODS.items() if "test-time" in entry.family}
    assert {"tent", "fedthe", "heterotent"} <= names
    assert "fedavg" not in names
    assert all(entry.family for entry in METHODS.values())
    assert "hypernetwork" in fedapps("list", "methods", "--family", "tests", code=2)
    assert "methods" in fedapps("list", "models", "--family", "test-time", code=2)


def test_a_run_leaves_the_collector_as_it_was(monkeypatch):
    """Here conftest.py has frozen what was imported; elsewhere nothing is frozen."""
    monkeypatch.setattr(gc, "get_freeze_count", gc.get_freeze_count.counted)
    imports_kept = sys.modules["fedapps.commands.run"].imports_kept
    frozen = gc.get_freeze_count()
    with imports_kept():
        pass
    assert gc.get_freeze_count() == frozen > 0
    gc.unfreeze()
    try:
        with imports_kept():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
