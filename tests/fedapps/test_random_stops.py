"""SIGINT, SIGTERM and SIGKILL at random moments: status, files, processes and digits afterwards.

FEDAPPS_STOPS sets how many stops each engine takes (here 3), FEDAPPS_STOPS_SEED which moments are
drawn, and FEDAPPS_SLOWNESS by what the 15 s for an end are multiplied on a busy machine:

    FEDAPPS_STOPS=100 pytest tests/fedapps/test_random_stops.py"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file
from small_runs import forked, left
from typer.testing import CliRunner

from fedapps.commands.main import cli
from fedapps.files import LOCK

STOPS = int(os.environ.get("FEDAPPS_STOPS", "3"))
SEED = os.environ.get("FEDAPPS_STOPS_SEED", "")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
END_SECONDS = 15.0 * float(os.environ.get("FEDAPPS_SLOWNESS", "1"))
METHODS = ("scaffold", "fedper")  # both keep states of clients
RUN = ["run", "num-clients=4", "train-fraction=0.75", "local-steps=2", "rounds=6",
       "checkpoint-every=1", "evaluate-every=2", "--methods", ",".join(METHODS)]  # fmt: skip
ENGINES = {
    "in-process": ["--engine", "in-process", "--jobs", "1"],
    "processes": ["--engine", "in-process", "--jobs", "2"],
    "ray": ["--engine", "ray"],
    "flower": ["--engine", "flower"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked"),
]


def started(words, temporary, said):
    """The id of a process that runs the command; its temporary files are in `temporary`, and what
    it printed and raised is in the file `said`."""

    def call():
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            done = CliRunner().invoke(cli, list(map(str, words)))
            said.write_text(f"{done.output}\n{done.exception!r}")
            return done.exit_code
        except KeyboardInterrupt:  # before the command has begun, as Python's own end
            return 128 + signal.SIGINT

    return forked(call)


def ended(child, seconds):
    """The exit status as a shell gives it, None if the process has not ended in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.005)
    return None


def descendants(child):
    """The processes that the process `child` has started, by their temporary folder too."""
    try:
        return psutil.Process(child).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def check_files(folder):
    """Every file that a reader knows by its name is whole."""
    for file in folder.rglob("*"):
        if file.name.startswith(".") or not file.is_file():
            continue
        if file.suffix == ".json":
            json.loads(file.read_text())
        if file.suffix == ".toml":
            tomllib.loads(file.read_text())
        if file.suffix == ".safetensors":
            load_file(file)


def hidden(folder):
    """Files that a write has left, such as a temporary one."""
    return [f for f in folder.rglob(".*") if f.name not in (LOCK, ".gitignore")]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_at_a_random_moment_leaves_nothing_and_loses_nothing(engine, tmp_path):
    output = tmp_path / "said"
    begin = [*RUN, *ENGINES[engine], "--output"]
    short = Path(tempfile.mkdtemp(prefix="s"))  # Ray's sockets need a short path
    try:
        begun = time.monotonic()
        code = ended(started([*begin, tmp_path / "whole"], short, output), 900)
        assert code == 0, output.read_text()
        seconds = time.monotonic() - begun
        expected = [left(tmp_path / "whole" / f"{method}-seed0") for method in METHODS]
        moments = random.Random(engine + SEED)
        cut = tmp_path / "cut"
        stops = 0
        counts = dict.fromkeys(SIGNALS, 0)
        while stops < STOPS:
            child = started([*begin, cut], short, output)
            code = ended(child, moments.uniform(0, seconds))
            if code is None:
                number = moments.choice(SIGNALS)
                others = descendants(child)
                os.kill(child, number)
                code = ended(child, END_SECONDS)
                said = (engine, stops, number, code)
                # 0: it had finished by then.
                assert code in (128 + number, 0), (said, output.read_text()[-2000:])
                psutil.wait_procs(others, END_SECONDS)
                assert not [p for p in others if p.is_running()], said
                deadline = time.monotonic() + END_SECONDS
                while any(short.iterdir()) and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert not list(short.iterdir()), said
                if number != signal.SIGKILL:
                    assert not cut.exists() or not hidden(cut), said
                check_files(cut)
                stops += 1
                counts[number] += 1
            if code == 0:
                assert [left(cut / f"{method}-seed0") for method in METHODS] == expected
                assert not hidden(cut)
                shutil.rmtree(cut)
        code = ended(started([*begin, cut], short, output), 900)
        assert code == 0, output.read_text()
        assert [left(cut / f"{method}-seed0") for method in METHODS] == expected
        assert not hidden(cut)
        print(f"{engine}: {stops} stops, {counts}")
    finally:
        shutil.rmtree(short, ignore_errors=True)
