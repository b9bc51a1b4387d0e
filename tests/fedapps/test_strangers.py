"""Run folders of strangers: every file and key exchanged, and opened by every command.

Whatever a folder holds, a command does its work or ends in one sentence. It imports nothing that
the folder names, starts nothing, and writes nowhere but where it was asked to."""

import os
import random
import shutil
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from corrupted_files import spoil
from matplotlib.figure import Figure
from run_folders import vouch
from small_runs import NEEDS, SMALL
from typer.main import get_command

from fedapps.commands.main import cli
from fedapps.common import external_code
from fedapps.planning import plan, read_request
from fedapps.results.card import make_card
from fedapps.results.checkpoint import newest_checkpoint
from fedapps.results.sweep import begun_jobs, keep_finished
from fedapps.serverapp import run_in_process
from fedapps.service.finished_run import load
from fedapps.service.inputs import read_input_files
from partitions import federation
from partitions.inspect import export

# Of 120 draws those that show every outcome: each command with each sentence that refuses.
CASES = (
    3, 4, 7, 10, 11, 14, 16, 19, 20, 21, 23, 29, 32, 35, 40, 49, 51, 52, 53, 56, 58, 60, 62,
    63, 64, 65, 66, 70, 71, 72, 74, 80, 82, 84, 87, 91, 92, 95, 97, 98, 101, 104, 105, 107,
    109, 119,
)  # fmt: skip
MANY = range(2400)
COMMAND = get_command(cli)  # made once: a tenth of the time of all calls
COMMANDS = {
    "show": ["show", "RUN"],
    "personalize": ["personalize", "RUN", "IN/data.npz", "--output", "OUT"],
    "report": ["report", "RUN"],
    "table": ["table", "RUN"],
    "csv": ["table", "RUN", "--format", "csv", "--by", "method,lr"],
    "latex": ["table", "RUN", "--format", "latex", "--round", "last"],
    "curves": ["plot", "RUN", "curves", "--output", "OUT/a.png"],
    "clients": ["plot", "RUN", "clients", "--output", "OUT/a.png"],
    "confusion": ["plot", "RUN", "confusion", "--output", "OUT/a.png"],
    "embeddings": ["plot", "RUN", "embeddings", "--output", "OUT/a.png"],
    "traces": ["plot", "RUN", "traces", "--steps", "1", "--output", "OUT/a.png"],
    "serve": ["serve", "RUN", "--deployment", "IN"],
    "update": ["personalize", "RUN", "IN/data.npz", "--update", "--output", "OUT"],
    "from": [],
    "resume": [],
}
# They read a run's tables and texts alone; what its arrays hold is nothing to them.
READ_NO_ARRAYS = {"report", "table", "csv", "latex", "curves", "clients"}
# Runs that differ to these commands; the others have scores as the first one has.
FOR_TABLES = {"fedtta++", "fedavg", "fedembed", "delivered"}
RUNS = {
    "fedtta++": {"fedtta++.max-steps": 1},
    "pfedhn": {"num-clients": 8},
    "fedper": {},
    "fedavg": {"dp": "local", "dp-noise-multiplier": 1.0},
    "odpfl-hn": {},
    "pfl-sampled": {"pfl-sampled.base": "fedper"},
    "fedembed": NEEDS["fedembed"] | {"num-clients": 20},
}
ABLE = {  # which of them can be shown so
    "curves": [method for method in RUNS if method != "fedavg"],
    "confusion": [method for method in RUNS if method != "fedavg"],
    "clients": [method for method in RUNS if method not in ("fedavg", "fedembed")],
    "traces": ["fedtta++"],
    "embeddings": ["pfedhn", "odpfl-hn"],
    "personalize": ["fedtta++", "fedavg", "odpfl-hn", "pfl-sampled"],
    "update": ["delivered"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A small finished run of each method, with its last checkpoint and an experiment's file; and a
    delivered model that goes on."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        remove = shutil.rmtree
        spared = {f"{method}-seed0": 1 for method in RUNS}

        def spare(folder, *arguments, **options):
            if Path(folder).name == "checkpoints" and "summary.json" in os.listdir(folder.parent):
                return
            remove(folder, *arguments, **options)

        patch.setattr(shutil, "rmtree", spare)
        for method, changes in RUNS.items():
            run = root / f"{method}-seed0"
            common = {"num-clients": 4, "checkpoint-every": 1, "method": method}
            run_in_process(SMALL | common | {"output-dir": str(run)} | changes)
            (run / "experiment.toml").write_text("lr = 0.3\n[published]\ntrain = {fedavg = 9.5}\n")
    assert all((root / name / "checkpoints").is_dir() for name in spared)
    run = root / "t3a"
    run_in_process(SMALL | {"num-clients": 4, "method": "t3a", "output-dir": str(run)})
    load(run).personalize(np.zeros((3, 1, 8, 8), np.uint8)).save(root / "delivered")
    shutil.rmtree(run)
    (root / "delivered" / "predictions.csv").unlink()  # nothing reads it
    return sorted(root.iterdir())


done, watching = [], []  # what the process did, while it is watched
CHANGES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "shutil.rmtree",
)
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")


def watch(event, arguments):
    """Python's audit hook: what is written, changed, started, and imported of a stranger's."""
    if not watching:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not isinstance(path, int) and (writes or set(mode or "") & set("wax+")):
            done.append((event, os.fsdecode(path)))
    elif event in ("os.remove", "os.rmdir") and arguments[1] != -1:
        return  # within a folder that rmtree removes
    elif event in CHANGES:
        done.extend((event, os.fsdecode(p)) for p in arguments[:2] if isinstance(p, str | Path))
    elif event in STARTS or (event == "import" and arguments[0].startswith("evil_module")):
        done.append((event, str(arguments[0])))


def without_layout(savefig):
    """`savefig` of whole figures, of few pixels, whose panels stay where they are."""

    def save(figure, *arguments, **options):
        figure.set_layout_engine("none")
        return savefig(figure, *arguments, **options | {"dpi": 20})

    return save


def opened(name, run, root):
    """The command's exit code; of --from and --resume what comes before anything is run."""
    if name not in ("from", "resume"):
        words = COMMANDS[name]
        for key, place in (("RUN", run), ("IN/", f"{root}/in/"), ("OUT", root / "out")):
            words = [word.replace(key, str(place)) for word in words]
        got = CliRunner().invoke(COMMAND, words, env={"COLUMNS": "300"})
        if not isinstance(got.exception, SystemExit | None):
            raise got.exception
        return got.exit_code
    try:
        if name == "from":
            jobs = plan(read_request([], "", "", run), root / "out", run, False, False)
        else:
            jobs = begun_jobs(run)
        keep_finished(jobs)
        for job in jobs:
            newest_checkpoint(job.folder, job.config)
    except (ValueError, OSError):
        return 2
    return 0


@pytest.fixture
def strangers(runs, tmp_path, monkeypatch):
    """Opens so many spoilt runs; returns what went wrong, by what it was."""
    data, places = tmp_path / "in", [tmp_path / name for name in ("out", "cache", "tmp")]
    for folder in (data, tmp_path / "tmp"):
        folder.mkdir()
    (data / "evil_module.py").write_text("raise SystemExit('imported')")
    np.savez(data / "data.npz", x=np.zeros((3, 1, 8, 8), np.uint8))
    monkeypatch.syspath_prepend(str(data))
    monkeypatch.chdir(data)
    monkeypatch.setenv(external_code.VARIABLE, "")
    monkeypatch.setenv("FEDAPPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    # To lay a figure out takes as long as to draw it, and reads the same texts.
    monkeypatch.setattr(Figure, "savefig", without_layout(Figure.savefig))
    for source in runs:  # as they are, they are opened; libraries look around when first used
        run = tmp_path / source.name
        shutil.copytree(source, run)
        method = run.name.partition("-seed")[0]
        for name in sorted(COMMANDS, key=READ_NO_ARRAYS.__contains__):
            if name in READ_NO_ARRAYS:
                if method not in FOR_TABLES:
                    break
                for file in run.rglob("*.safetensors"):
                    file.unlink()
            able = name != "serve" and method in ABLE.get(name, RUNS)
            assert opened(name, run, tmp_path) == (0 if able else 2), (name, run.name)
        shutil.rmtree(run)
    sys.addaudithook(watch)  # for good: it cannot be taken off

    def look(name, run):
        done.clear()
        watching.append(True)
        try:
            code = opened(name, run, tmp_path)
        except Exception:
            return traceback.format_exc(limit=-6)
        finally:
            watching.clear()
        known = (str(run), *map(str, places), os.devnull)
        odd = [deed for deed in done if not deed[1].startswith(known)]
        return f"{odd}" if odd else "" if code in (0, 2) else f"exit code {code}"

    def open_all(cases, seed):
        found = {}  # by the last lines
        for case in cases:
            draw = random.Random(f"{seed} {case}")
            source = draw.choice(runs)
            run = tmp_path / source.name
            shutil.copytree(source, run)
            file = draw.choice(sorted(f for f in run.rglob("*") if f.is_file()))
            kind = spoil(file, draw)
            if (
                file.suffix == ".safetensors" and draw.random() < 0.7
            ):  # a person who changes it can vouch
                vouch(run, "report.json" if run.name == "delivered" else "summary.json")
            names, count = set(COMMANDS), 3
            if file.suffix == ".safetensors":
                names, count = names - READ_NO_ARRAYS, 2
            for name in draw.sample(sorted(names), count):
                if wrong := look(name, run):
                    got = f"case {case}: {name} {file.relative_to(tmp_path)} ({kind}): {wrong}"
                    found.setdefault("".join(wrong.splitlines()[-4:-1]), []).append(got)
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
            shutil.rmtree(run)
        return "\n".join(f"{len(got)}× {got[0]}" for got in found.values())

    return open_all


def test_a_strangers_folder_does_nothing_but_be_read(strangers):
    wrong = strangers(CASES, 0)
    assert not wrong, wrong


@pytest.mark.slow
def test_many_strangers_folders_do_nothing_but_be_read(strangers):
    wrong = strangers(MANY, 1)
    assert not wrong, wrong


def test_data_of_a_stranger_are_read_or_refused(tmp_path):
    """Exported folders with anything exchanged, and arrays without rows."""
    source = export(federation(SMALL), tmp_path / "clients")[0]
    card = make_card(SMALL)
    for case in range(120):
        draw = random.Random(f"data {case}")
        folder = tmp_path / "one"
        shutil.copytree(source, folder)
        spoil(draw.choice(sorted(folder.iterdir())), draw)
        with suppress(ValueError, OSError):
            share = read_input_files(folder, card).share
            assert share.everything[:][0].shape[1:] == (1, 8, 8)
            assert len(share.train[:][1]) == len(share.train)
        shutil.rmtree(folder)
    one = np.ones((1, 1, 8, 8))
    for arrays in (
        {"x": 1.0, "y": [1]},
        {"x": one, "y": []},
        {"x": 1},
        {"x": one, "y": one[..., 8:]},
    ):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(ValueError, match="must have a row for each sample"):
            read_input_files(tmp_path / "a.npz", card)
