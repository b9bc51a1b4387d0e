"""Several runs side by side, each whole in one of a few processes."""

import os
import signal

import pytest
from tiny import SMALL

from fedapps.engines import flwr
from fedapps.engines import jobs as engine
from fedapps.engines.jobs import chosen, longest_first, make_jobs, run_jobs


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


def test_runs_that_take_longest_begin_first(tmp_path):
    """A round of FedTTA++ takes as long as five of FedAvg; those alike stay as they were named."""
    methods = ["fedavg", "fedper", "fedavg rounds=4", "fedtta++", "tent", "fedavg rounds=40"]
    work = longest_first(make_jobs(SMALL | {"rounds": 2}, methods, [0], tmp_path))
    assert [job.method for job in work] == [
        "fedavg rounds=40", "fedtta++", "fedavg rounds=4", "fedavg", "fedper", "tent"
    ]  # fmt: skip


def test_a_superlink_that_never_answers_is_an_error(tmp_path, monkeypatch):
    command = tmp_path / "flwr"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setattr(flwr, "COMMANDS", tmp_path)
    monkeypatch.setattr(flwr, "ANSWER_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match="flwr ls had no answer in 1 seconds"):
        flwr.Flwr(tmp_path / "home", "one").status(7)


class Busy:
    """A SuperLink that leaves some questions for a run's status without an answer."""

    def __init__(self, answers):
        self.answers, self.submitted = iter(answers), 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def check(self):
        pass

    def submit(self, config, federation):
        self.submitted += 1
        return self.submitted

    def status(self, run_id):
        if next(self.answers):
            return "finished:completed", ""
        raise RuntimeError("flwr ls had no answer")


def test_a_question_without_an_answer_does_not_end_a_sweep(tmp_path, monkeypatch):
    """Three in a row are lived with, and three again after an answer; the fourth ends all."""
    monkeypatch.setattr(engine, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.0)
    for answers in ([0, 0, 0, 1] * 2, [0, 1, 0, 0, 0, 0]):
        monkeypatch.setattr(engine, "SuperLink", lambda log, answers=answers: Busy(answers))
        jobs = make_jobs(SMALL, ["fedavg", "fedavg lr=0.1"], [0], tmp_path)
        if answers[:3] == [0, 0, 0]:
            run_jobs(jobs, "flower", follow=lambda _: None)
            assert [job.error for job in jobs] == ["the run finished:completed"] * 2
        else:
            with pytest.raises(RuntimeError, match="flwr ls had no answer"):
                run_jobs(jobs, "flower", follow=lambda _: None)
            assert [job.done for job in jobs] == [True, False]


@pytest.mark.parametrize(
    ("runs", "parallel", "ray", "expected"),
    [
        (5, None, False, ("in-process", 3)),
        (3, None, False, ("in-process", 3)),
        (2, None, False, ("ray", 1)),  # a core would have nothing to do
        (2, 2, False, ("in-process", 2)),
        (5, 1, False, ("ray", 1)),  # one is asked for
        (5, None, True, ("ray", 1)),
    ],
)
def test_each_core_gets_a_run_where_there_are_enough(monkeypatch, runs, parallel, ray, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    assert chosen(runs, parallel, ray=ray) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    assert chosen(20, None, ray=False) == ("in-process", 8)  # each takes memory of its own
