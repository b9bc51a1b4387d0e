"""SIGKILL at random moments: runs and sweeps go on, and end as if nobody had killed them.

FEDAPPS_KILLS sets how many kills each run takes (here 2, and 2 methods); with more than 2 all
methods of `RUNS` are killed, for 30 rounds each:

    FEDAPPS_KILLS=20 pytest tests/fedapps/test_kills.py"""

import json
import os
import random
import shutil
import signal
import time

import pytest
from click.testing import CliRunner
from small_runs import COMMAND, TASTES, forked, left

from fedapps.results import plot
from fedapps.results.checkpoint import saved_round

KILLS = int(os.environ.get("FEDAPPS_KILLS", "2"))
SHORT = KILLS <= 2
SOM = {"fedembed.assignment": "som"} | TASTES
RUNS = {"scaffold": {}, "fedembed": SOM} | ({} if SHORT else {
    "fedavg": {}, "pfedhn": {}, "fedtta++": {}, "afl": {"afl.mixture-lr": 0.1},
})  # fmt: skip
SMALL = {"num-clients": 4, "train-fraction": 0.75, "fraction-train": 0.5, "local-steps": 2}
SMALL |= {"rounds": 4 if SHORT else 30, "checkpoint-every": 1 if SHORT else 3}


def fedapps(*arguments):
    """The command in a process of its own."""

    def call():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        plot.as_svg = lambda figure, name: name  # drawing takes longer than the runs
        words = ["run", *map(str, arguments), "--engine", "in-process"]
        return CliRunner().invoke(COMMAND, words).exit_code

    return forked(call)


def killed(child, seconds, run=None, round_=0):
    """Whether the process was killed, `seconds` after its `run` had saved this round; False if it
    had ended by then."""
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        if deadline is None and (not round_ or saved_round(run) >= round_):
            deadline = time.monotonic() + seconds
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def settings(config):
    """The command's words; those of other methods than the one that runs are refused."""
    return [f"{key}={value}" for key, value in config.items() if not key.startswith("pfedkm.")]


def finished(folder):
    """When the metrics of the finished runs in `folder` were last written, by run."""
    return {
        file.parent.name: (file.parent / "metrics.jsonl").stat().st_mtime_ns
        for file in folder.glob("*/summary.json")
        if json.loads(file.read_text()).get("finished")
    }


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


@pytest.mark.parametrize("method", RUNS)
def test_a_run_that_is_killed_at_random_moments_ends_the_same(method, tmp_path):
    begin = [*settings(SMALL | RUNS[method]), "--methods", method]
    begun = time.monotonic()
    assert os.waitpid(fedapps(*begin, "--output", tmp_path / "whole"), 0)[1] == 0
    seconds = time.monotonic() - begun
    expected = left(tmp_path / "whole" / f"{method}-seed0")
    moments = random.Random(method)
    run = tmp_path / "cut" / f"{method}-seed0"
    kills = resumed = 0
    while kills < KILLS:
        there = (run / "config.toml").is_file()
        child = fedapps(*(["--resume", run] if there else [*begin, "--output", tmp_path / "cut"]))
        saved = saved_round(run)
        # Half of the kills wait for a further round; the others come at any moment.
        next_round = saved + 1 if kills % 2 == 0 else 0
        pause = 0.01 if next_round else seconds  # a round takes about as long
        if killed(child, moments.uniform(0, pause), run, next_round):
            kills += 1
            resumed += saved_round(run) > 0
            continue
        assert left(run) == expected
        shutil.rmtree(run)  # it had ended before its moment came: once more
    assert resumed
    assert os.waitpid(fedapps("--resume", run), 0)[1] == 0
    assert left(run) == expected


@pytest.mark.parametrize("again", ["--resume", "--output"])
def test_a_finished_run_that_is_met_again_loses_its_checkpoints(again, tmp_path):
    """As if it had been killed between its end and their removal."""
    begin = [*settings(SMALL | {"rounds": 1}), "--methods", "local", "--output", tmp_path]
    assert os.waitpid(fedapps(*begin), 0)[1] == 0
    run = tmp_path / "local-seed0"
    expected, ended = left(run), finished(tmp_path)
    (run / "checkpoints").mkdir()
    shutil.copy(run / "model.safetensors", run / "checkpoints" / "round-00000001.safetensors")
    words = ["--resume", run] if again == "--resume" else begin
    assert os.waitpid(fedapps(*words), 0)[1] == 0
    assert not (run / "checkpoints").exists()
    assert (left(run), finished(tmp_path)) == (expected, ended)


def test_a_sweep_that_is_killed_three_times_loses_nothing_that_was_finished(tmp_path):
    methods = ["fedavg", "scaffold", "local", "tent"]
    begin = [*settings(SMALL | {"rounds": 4}), "--methods", ",".join(methods)]
    begun = time.monotonic()
    assert os.waitpid(fedapps(*begin, "--output", tmp_path / "whole"), 0)[1] == 0
    seconds = time.monotonic() - begun
    cut, done = tmp_path / "cut", {}
    for part in (0.3, 0.5, 0.4):
        child = fedapps(*begin, "--output", cut)
        killed(child, part * seconds)
        assert finished(cut).items() >= done.items()
        done = finished(cut)
    assert os.waitpid(fedapps(*begin, "--output", cut), 0)[1] == 0
    assert finished(cut).items() >= done.items()
    assert finished(cut).keys() == finished(tmp_path / "whole").keys()
    for run in finished(cut):
        assert left(cut / run) == left(tmp_path / "whole" / run)
