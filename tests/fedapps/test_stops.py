"""How runs end, and who is at their folder: Stop, SystemExit, a signal, another process."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from flwr.app import RecordDict
from small_runs import SMALL, cut_before, dying_in, fedapps, federate, forked, wait

from fedapps import run
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.engines.run import run_jobs
from fedapps.files import locked, resume_command
from fedapps.planning import make_jobs
from fedapps.results.checkpoint import saved_round
from fedapps.serverapp import APPS
from fedapps.settings.saved_configurations import run_configuration
from strategies.core.round_state import Stop
from strategies.methods.fedavg import FedAvg

RUN = ["run", "num-clients=4", "local-steps=1", "--engine", "in-process", "--methods", "fedavg"]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_is_stopped_between_evaluations_is_evaluated_at_its_end(tmp_path, monkeypatch):
    """In round 3 of 9, evaluated every fifth round; reported once, with a model and a table."""
    from fedapps.callbacks import Callbacks

    def ends(self, report, strategy):
        if report["round"] == 3:
            raise Stop("enough")

    monkeypatch.setattr(Callbacks, "round_ends", ends)
    federate(rounds=9, **{"evaluate-every": 5, "output-dir": str(tmp_path)})
    assert [line["round"] for line in lines(tmp_path)] == [1, 2, 3]
    assert "train-accuracy" in lines(tmp_path)[-1]["evaluation"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"] and summary["best_round"] == summary["rounds"] == 3
    assert (tmp_path / "model.safetensors").is_file()


class Panic(BaseException):
    """As pyo3's PanicException, which libraries in Rust raise."""


@pytest.mark.parametrize("kind", [SystemExit, Panic, KeyboardInterrupt])
def test_a_run_that_ends_its_thread_costs_itself_alone(kind, tmp_path, monkeypatch):
    """A callback may call sys.exit in a run, or a library raise what is no Exception: the run
    failed, and the other runs go on."""

    def leave(*_):
        raise kind("bye")

    config = SMALL | {"rounds": 1, "local-steps": 1}
    jobs = make_jobs(config, ["fedavg", "pfedhn"], [0], tmp_path)
    monkeypatch.setattr(FedAvg, "aggregate_train", leave)
    run_jobs(jobs, "in-process", APPS, follow=lambda _: None)
    assert all(job.done for job in jobs)
    assert jobs[0].error.startswith(f"{kind.__name__}: bye ({__file__}:") and not jobs[1].error


@pytest.mark.parametrize("kind", [SystemExit, Panic])
def test_a_client_that_exits_costs_its_reply(kind):
    def app(message, context):
        raise kind("bye")

    grid = InProcessGrid.simulation(app, SMALL, 1)
    (reply,) = grid.send_and_receive([grid.create_message(RecordDict(), "query", 1, "")])
    assert f"{kind.__name__}: bye" in reply.error.reason


def test_nobody_else_writes_to_a_run_that_goes_on(tmp_path):
    """Held by another process, the folder is refused; once that is gone, however it ended, not."""
    folder = tmp_path / "fedavg-seed0"
    folder.mkdir()
    said, line = tmp_path / "held", '{"round": 1, "seconds": 0.1}\n'

    def hold():
        with locked(folder):
            said.touch()
            time.sleep(600)

    child = forked(hold)
    try:
        while not said.exists():
            time.sleep(0.01)
        (folder / "metrics.jsonl").write_text(line)
        got = fedapps(*RUN, "rounds=1", "--output", tmp_path, code=1)
        assert "another process uses the run in" in got
        assert (folder / "metrics.jsonl").read_text() == line
        with pytest.raises(OSError, match="another process uses the run"):
            federate(**{"output-dir": str(folder)})
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    fedapps(*RUN, "rounds=1", "--output", tmp_path)


def test_an_unfinished_run_of_another_configuration_is_not_lost(tmp_path):
    own = [*RUN, "checkpoint-every=1", "--output", tmp_path]
    with dying_in(3, RuntimeError("lost")):
        fedapps(*own, "rounds=4", code=1)
    said = fedapps(*own, "rounds=5", code=2)
    assert "holds an unfinished run of another configuration (rounds is 4 there, 5 here)" in said
    assert len(lines(tmp_path / "fedavg-seed0")) == 2
    fedapps(*own, "rounds=4")
    assert len(lines(tmp_path / "fedavg-seed0")) == 4


def test_a_resumed_run_says_at_which_round_it_continues(tmp_path, caplog):
    own = [*RUN, "rounds=4", "--output", tmp_path]
    with dying_in(4, RuntimeError("lost")):
        said = fedapps(*own, "checkpoint-every=2", code=1)
    assert "continues" not in said and "begins" not in said  # a new run
    config = run_configuration(tmp_path / "fedavg-seed0") | {"resume": True}
    with caplog.at_level(logging.INFO, "flwr"), cut_before(3):
        federate(**config)
    assert "the run continues at round 3" in caplog.text
    assert "fedavg-seed0 continues at round 3 of 4" in fedapps("run", "--resume", tmp_path)


@pytest.mark.parametrize("damage", [b"method =", b"\xff", b"x = " + 5000 * b"["])
def test_a_run_whose_configuration_is_damaged_continues_by_its_command(damage, tmp_path):
    own = [*RUN, "rounds=2", "checkpoint-every=1", "--output", tmp_path]
    with dying_in(2, RuntimeError("lost")):
        fedapps(*own, code=1)
    file = tmp_path / "fedavg-seed0" / "config.toml"
    file.write_bytes(damage)
    said = fedapps("run", "--resume", tmp_path, code=2)
    assert f"error: {file} is damaged: " in said
    assert "repeat the command that began it, which commands.txt beside the run names" in said
    assert "fedavg-seed0 continues at round 2 of 2" in fedapps(*own)


def test_a_run_without_a_checkpoint_says_that_it_begins_anew(tmp_path):
    own = [*RUN, "rounds=2", "checkpoint-every=0", "--output", tmp_path]
    with dying_in(2, RuntimeError("lost")):
        fedapps(*own, code=1)
    assert "fedavg-seed0 begins at round 1: it has no checkpoint" in fedapps(*own)


def test_the_command_that_resumes_allows_the_runs_own_code(tmp_path):
    folder = tmp_path / "my runs"
    assert resume_command(folder, ["my_lab.hooks:Slack"] * 2) == (
        f"fedapps run --resume '{folder}' --allow my_lab.hooks:Slack"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_api_names_the_command_that_resumes(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"num_clients": 4, "rounds": 30000, "local_steps": 300, "checkpoint_every": 1}

    with Path("said").open("w", buffering=1) as said, Path("errors").open("w") as errors:

        def call():
            sys.stdout, sys.stderr = said, errors
            run("fedavg", 0, output="out", engine="in-process", progress=False, **settings)

        child = forked(call)
    try:
        wait(lambda: saved_round(tmp_path / "out/fedavg-seed0"), 120, Path("errors").read_text)
    finally:
        os.kill(child, number)
        os.waitpid(child, 0)
    got = Path("said").read_text()
    assert "KeyboardInterrupt" in Path("errors").read_text()
    assert "fedavg-seed0: stopped after round" in got
    assert got.endswith("stopped; to continue: fedapps run --resume out\n")


def test_an_interrupted_run_leaves_its_process_as_it_was(tmp_path):
    """As in a notebook: no thread, no filter of Flower's log, no lock of the folder remains."""
    config = SMALL | {"rounds": 30000, "checkpoint-every": 1, "stacked-clients": 2}
    (job,) = make_jobs(config, ["fedavg"], [0], tmp_path)
    threads = threading.enumerate()
    filters = list(logging.getLogger("flwr").filters)

    def follow(_):
        if saved_round(job.folder):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([job], "in-process", APPS, follow=follow)
    wait(lambda: threading.enumerate() == threads, 60, lambda: str(threading.enumerate()))
    assert logging.getLogger("flwr").filters == filters
    with locked(job.folder):
        assert saved_round(job.folder)


STARTS = """
import json, os, sys
import fedapps.engines.run, fedapps.planning, fedapps.serverapp
from fedapps.__main__ import main

for line in sys.stdin:
    words, output = json.loads(line)
    child = os.fork()
    if not child:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv = ["fedapps", *words]
        main()
        sys.exit()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def start():
    """Starts the command as a process that prints to the file `output`. Gives its id, and a
    function that waits for its exit code.

    It is forked from a process that has imported what takes seconds. That is not this one: some of
    the libraries that tests load cannot end in a fork."""

    def start(words, output):
        starter.stdin.write(json.dumps([[str(word) for word in words], str(output)]) + "\n")
        starter.stdin.flush()
        child = int(starter.stdout.readline())
        return child, lambda: int(starter.stdout.readline())

    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        yield start
        starter.stdin.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_sigterm_ends_the_command_in_order_as_ctrl_c_does(start, tmp_path):
    words = [*RUN, "rounds=30000", "local-steps=300", "checkpoint-every=1", "--output", tmp_path]
    said = tmp_path / "said"
    child, exit_code = start(words, said)
    try:
        wait(lambda: saved_round(tmp_path / "fedavg-seed0"), 120, said.read_text)
    finally:
        os.kill(child, signal.SIGTERM)
        code = exit_code()
    got = said.read_text()
    assert code == 143, got
    assert "terminate called" not in got
    (number,) = re.findall(r"fedavg-seed0: stopped after round \d+, continues at (\d+)", got)
    assert got.endswith(f"stopped; to continue: fedapps run --resume {tmp_path}\n")
    assert int(number) - 1 == saved_round(tmp_path / "fedavg-seed0") > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_two_ctrl_c_in_a_long_step_end_the_run_without_an_abort(start, tmp_path):
    """The second one ends the wait for the client, whose thread is within torch."""
    words = ["run", "num-clients=2", "model=mlp", "local-steps=4000", "--methods", "fedavg",
             "--engine", "in-process", "--output", tmp_path]  # fmt: skip
    output = tmp_path / "said"
    child, exit_code = start(words, output)
    try:
        wait((tmp_path / "fedavg-seed0" / "metrics.jsonl").is_file, 120, output.read_text)
    finally:
        for _ in range(2):
            time.sleep(0.3)  # the next round has begun; the first signal has been taken
            os.kill(child, signal.SIGINT)
        code = exit_code()
    said = output.read_text()
    assert said.endswith(f"stopped; to continue: fedapps run --resume {tmp_path}\n"), said
    assert code == 130
