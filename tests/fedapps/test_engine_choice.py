"""The engine of runs for which the user names none, by the seconds of a client's turn."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from small_runs import SMALL

import partitions
from clients.methods.auto import AutoClient
from fedapps import engine_choice, estimate
from fedapps.building import method_model
from fedapps.engine_choice import (
    Choice,
    Clock,
    Machine,
    choose_engine,
    seconds_in_process,
    seconds_on_ray,
)
from fedapps.estimate import Cost
from fedapps.planning import make_jobs

SHORT, LONG = 0.001, 2.0  # seconds of a turn
QUIET = Machine(4, 0.0)


def of_seconds(*values: float) -> list[Cost]:
    return [Cost(seconds, 0.0, turns=100, clients=10) for seconds in values]


def test_processes_take_the_longest_run_first():
    """40, then 30 and 20, on two processes: 40 + 0 and 30 + 20, and 5 s until both work."""
    assert seconds_in_process(of_seconds(20, 40, 30), 2, QUIET) == 5 + 50
    assert seconds_in_process(of_seconds(20, 40, 30), 1, QUIET) == 90  # no process is started


def test_cores_without_a_client_cost_time_on_ray():
    """Ten clients on four cores are three batches: 3.33 at a time. 8 + 100 / 3.33 × 1.15 + 100
    turns of 1.25 ms."""
    assert seconds_on_ray(of_seconds(100), 4, QUIET) == pytest.approx(8 + 30 * 1.15 + 0.125)
    # A single client has one core, whatever the machine.
    alone = [Cost(100.0, 0.0, turns=0, clients=1)]
    assert seconds_on_ray(alone, 64, Machine(64, 0.0)) == pytest.approx(8 + 115)


def test_other_work_takes_its_share_of_the_cores():
    """Beside one busy process on two cores, one of ours has a core, and two have 2/3 of one each:
    1.33 times as fast as one. Beside six, one has 2/7, two have 2/8: 1.75 times."""
    for load, speedup in ((0, 2), (1, 4 / 3), (6, 7 / 4)):
        machine = Machine(2, load)
        share = 2 / (2 + load)
        expected = 8 / share + 100 / speedup * 1.15 + 0.125
        assert seconds_on_ray(of_seconds(100), 2, machine) == pytest.approx(expected)
        expected = 5 / share + 2 * 20 / speedup
        assert seconds_in_process(of_seconds(20, 20), 2, machine) == pytest.approx(expected)
        # A single process is as fast as when its turn was measured.
        assert seconds_in_process(of_seconds(20, 20), 1, machine) == 40


def test_the_load_is_what_other_processes_use_meanwhile(monkeypatch):
    """In two seconds all processes used 5 s, this one 1.5 s: others keep 1.75 processors busy."""
    monkeypatch.setattr(engine_choice.os, "cpu_count", lambda: 4)
    clocks = iter([Clock(12.0, 105.0, 8.5), Clock(12.0, 101.0, 8.5)])
    monkeypatch.setattr(Clock, "now", lambda: next(clocks))
    start = Clock(10.0, 100.0, 7.0)
    assert Machine.watched_since(start) == (4, 1.75)
    # The system counts in hundredths of a second: the difference may be below zero.
    assert Machine.watched_since(start) == (4, 0.0)


def test_all_processes_include_this_one():
    """The system counts in hundredths of a second."""
    start = Clock.now()
    while time.process_time() < start.own + 0.2:
        pass
    end = Clock.now()
    assert end.own - start.own >= 0.2
    assert end.all - start.all >= end.own - start.own - 0.03


@pytest.mark.parametrize(
    ("runs", "turn", "parallel", "cores", "expected"),
    [
        (1, SHORT, None, 2, ("in-process", 1)),  # Ray needs 8 s to start
        (1, LONG, None, 2, ("ray", 1)),  # one run has one core in process
        (2, LONG, None, 2, ("in-process", 2)),  # each core has a run
        (2, LONG, None, 4, ("ray", 1)),  # two cores would have nothing to do
        (3, LONG, None, 2, ("ray", 1)),  # one core would have nothing to do for a half of the time
        (6, LONG, None, 2, ("in-process", 2)),
        (6, SHORT, None, 2, ("in-process", 2)),
        (2, LONG, 1, 2, ("ray", 1)),  # one run at a time
        (2, SHORT, 1, 2, ("in-process", 1)),
        (1, LONG, None, 1, ("in-process", 1)),
        (20, SHORT, None, 10, ("in-process", 8)),  # each process takes memory
        (20, LONG, None, 10, ("ray", 1)),  # and leaves two of ten cores idle
    ],
)
def test_the_faster_engine_is_chosen(monkeypatch, tmp_path, runs, turn, parallel, cores, expected):
    monkeypatch.setattr(engine_choice, "num_cpus", lambda: cores)
    monkeypatch.setattr(estimate, "_measure", lambda config: (turn, turn / 10, 1000))
    monkeypatch.setattr(Machine, "watched_since", lambda start: Machine(cores, 0.0))
    config = SMALL | {"rounds": 20, "num-clients": 160}
    jobs = make_jobs(config, ["fedavg"], list(range(runs + 1)), tmp_path)
    jobs[0].done = True
    assert choose_engine(jobs, parallel, ray=False, measured={})[:2] == expected


def test_no_turn_is_measured_where_one_engine_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(engine_choice, "num_cpus", lambda: 4)
    jobs = make_jobs(SMALL, ["fedavg"], [0, 1], tmp_path)
    measured = {}
    assert choose_engine(jobs, 2, ray=False, measured=measured)[:2] == ("in-process", 2)
    assert choose_engine(jobs, None, ray=True, measured=measured) == Choice("ray", 1)
    for job in jobs:
        job.config = job.config | {"stacked-clients": 4}
    assert choose_engine(jobs, None, ray=False, measured=measured)[:2] == ("in-process", 2)
    assert not measured


def test_the_line_says_what_was_measured_and_equal_work_is_measured_once(tmp_path):
    jobs = make_jobs(SMALL, ["fedavg", "fedavg lr=0.1", "fedper"], [0, 1], tmp_path)
    measured = {}
    choice = choose_engine(jobs, None, ray=False, measured=measured)
    assert len(measured) == 1
    assert choice.line.startswith("engine: in-process, since a client's turn takes ")
    assert "6 runs take about" in choice.line
    assert "on ray about" in choice.line


def test_the_turn_of_a_client_with_labels_is_measured(tmp_path):
    """Of two training clients one, the first of this seed, has none: FedAvg cannot train it."""
    changes = {"partition.labeled-clients": 0.5, "num-clients": 4, "train-fraction": 0.5}
    first_are_unlabeled = 0
    for seed in range(4):
        config = SMALL | changes | {"data-seed": seed}
        federation = partitions.federation(config)
        training = np.flatnonzero(~federation.novel)
        first_are_unlabeled += bool(federation.unlabeled[training[0]])
        choice = choose_engine(make_jobs(config, ["fedavg"], [0], tmp_path), None, ray=False,
                               measured={})  # fmt: skip
        assert "since a client's turn takes" in choice.line
    assert first_are_unlabeled


def test_a_turn_that_fails_is_named(tmp_path):
    jobs = make_jobs(SMALL | {"dataset": str(tmp_path / "gone.npz")}, ["fedavg"], [0], tmp_path)
    choice = choose_engine(jobs, None, ray=False, measured={})
    assert choice.engine == "in-process"
    assert "could not be measured: " in choice.reason
    assert "gone.npz" in choice.reason


def test_finished_rounds_cost_nothing(tmp_path, monkeypatch):
    """Ten of twenty rounds are saved: half of the turns of training are left."""
    monkeypatch.setattr(estimate, "_measure", lambda config: (1.0, 0.0, 1000))
    config = SMALL | {"rounds": 20, "num-clients": 20, "resume": True}
    job = make_jobs(config, ["fedavg"], [0], tmp_path)[0]
    whole = estimate.cost(job, {})
    folder = job.folder / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "round-00000010.safetensors").touch()
    assert estimate.cost(job, {}).seconds == whole.seconds / 2


def test_what_the_rule_of_auto_is_made_from_counts_in_its_memory(tmp_path, monkeypatch):
    """Ten clients train; nothing is held where nobody plays newcomers."""
    monkeypatch.setattr(estimate, "_measure", lambda config: (1.0, 0.0, 1000))
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=10**6))
    monkeypatch.setattr(estimate.psutil, "Process", lambda: process)
    config = SMALL | {"num-clients": 20, "train-fraction": 0.5}
    memory = {}
    for label in ("fedavg", "auto", "auto plays=0"):
        job = make_jobs(config, [label], [0], tmp_path)[0]
        memory[label] = estimate.cost(job, {}).memory
    assert memory["fedavg"] == memory["auto plays=0"]
    network, _ = method_model("auto", config, partitions.task(config))
    held = AutoClient.bytes_after_rounds(network, 10, plays=5)
    assert memory["auto"] - memory["fedavg"] == held > 10**6
