"""Several runs side by side, each whole in one of a few processes."""

import os
import signal
from pathlib import Path

import pytest
from tiny import SMALL

from fedapps.engines import flwr
from fedapps.engines import jobs as engine
from fedapps.engines.jobs import chosen, make_jobs, run_jobs


def test_a_process_takes_one_job_after_the_other_and_costs_its_own_when_it_dies(
    tmp_path, monkeypatch
):
    """Two processes for four jobs: one job would never end, and its process is killed when the
    other one has told that its first job failed; the third and the fourth are carried out."""
    methods = ["fedavg rounds=90000", "fedavg min-valid-replies=9", "fedper", "local"]
    jobs = make_jobs(SMALL | {"num-clients": 2}, methods, [0], tmp_path)
    make, processes = engine._worker, []

    def worker():
        pipe, process = make()
        processes.append(process)
        return pipe, process

    def follow(_):
        if jobs[1].done and not jobs[0].done:
            os.kill(processes[1].pid, signal.SIGKILL)  # the last one that waits takes the first job

    monkeypatch.setattr(engine, "_worker", worker)
    run_jobs(jobs, "in-process", parallel=2, follow=follow)
    assert jobs[0].error == "its process ended with code -9"
    assert "1 valid replies of 1, min-valid-replies is 9" in jobs[1].error
    assert [job.error for job in jobs[2:]] == ["", ""]
    assert all(job.done and job.summary()["rounds"] == 2 for job in jobs[2:])
    assert len(processes) <= 3


class Stuck:
    """A SuperLink whose every run has done its jobs, and does not end until it is stopped."""

    def __init__(self, *_):
        self.stopped = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, config, federation):
        for name in config["method"].split(","):
            folder = Path(config["output-dir"])
            folder = folder if "," not in config["method"] else folder / f"{name}-seed0"
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text('{"finished": true}')
        return 7

    def check(self):
        pass

    def status(self, run_id):
        return "running", ""

    def cancel(self, run_id):
        self.stopped.append(run_id)


def test_nobody_waits_for_a_flower_run_whose_jobs_are_done(tmp_path, monkeypatch):
    """Their results are whole, whatever Ray does when it is to end."""
    superlink = Stuck()
    monkeypatch.setattr(engine, "SuperLink", lambda _: superlink)
    monkeypatch.setattr(engine, "END_SECONDS", 1.0)
    jobs = make_jobs(SMALL, ["fedavg", "local"], [0], tmp_path)
    run_jobs(jobs, "flower", follow=lambda _: None)
    assert [(job.done, job.error) for job in jobs] == [(True, "")] * 2
    assert superlink.stopped == [7]


def test_a_superlink_that_never_answers_is_an_error(tmp_path, monkeypatch):
    command = tmp_path / "flwr"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setattr(flwr, "COMMANDS", tmp_path)
    monkeypatch.setattr(flwr, "ANSWER_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match="flwr ls had no answer in 1 seconds"):
        flwr.Flwr(tmp_path / "home", "one").status(7)


@pytest.mark.parametrize(
    ("runs", "parallel", "ray", "expected"),
    [
        (5, 1, False, ("in-process", 3)),
        (3, 1, False, ("in-process", 3)),
        (2, 1, False, ("ray", 1)),  # a core would have nothing to do
        (2, 2, False, ("in-process", 2)),
        (5, 1, True, ("ray", 1)),
    ],
)
def test_each_core_gets_a_run_where_there_are_enough(monkeypatch, runs, parallel, ray, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    assert chosen(runs, parallel, ray=ray) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    assert chosen(20, 1, ray=False) == ("in-process", 8)  # each takes memory of its own
