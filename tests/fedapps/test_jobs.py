"""Several jobs: in worker processes, and on a SuperLink that does not answer."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from filelock import FileLock
from small_runs import SMALL, forked_workers

from fedapps.engines import flower, job_pool, job_worker, worker_process
from fedapps.engines import run as engines
from fedapps.engines.flower import flower_runs, run_on_flower
from fedapps.engines.job_pool import longest_first, run_as_processes
from fedapps.engines.run import run_in_turn, run_jobs
from fedapps.files import LOCK, locked, write_configuration
from fedapps.planning import make_jobs
from fedapps.serverapp import APPS
from fedapps.settings.config import defaults


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process is forked")
def test_a_worker_that_is_terminated_ends_what_it_writes(tmp_path, monkeypatch):
    def work(pipe, level):
        try:
            pipe.send("writing")
            time.sleep(60)
        finally:
            (tmp_path / "removed").touch()

    monkeypatch.setattr(job_worker, "work", work)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    worker = fork.Process(target=worker_process.start, args=(theirs, 0), daemon=True)
    worker.start()
    assert ours.recv() == "writing"
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 128 + signal.SIGTERM
    assert (tmp_path / "removed").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_process_takes_one_job_after_the_other_and_costs_its_own_when_it_dies(
    tmp_path, monkeypatch
):
    """Two processes for four jobs: the first job would never end, and its process is killed when
    the other process has returned the second job's error. The others are carried out. The first
    process starts as a worker does; the others are forked, without seconds of imports."""
    methods = ["fedavg rounds=90000", "fedavg min-valid-replies=9", "fedper", "local"]
    jobs = make_jobs(SMALL | {"num-clients": 2}, methods, [0], tmp_path)
    first, others, processes = job_pool._start_worker, forked_workers(), []

    def start_worker():
        pipe, worker = others() if processes else first()
        processes.append(worker)
        return pipe, worker

    def follow(_):
        if jobs[1].done and not jobs[0].done:
            os.kill(processes[1].pid, signal.SIGKILL)  # the last idle one takes the first job

    monkeypatch.setattr(job_pool, "_start_worker", start_worker)
    run_jobs(jobs, "in-process", APPS, parallel=2, follow=follow)
    assert jobs[0].error == "its process ended with code -9"
    assert "1 valid replies of 1, min-valid-replies is 9" in jobs[1].error
    assert [job.error for job in jobs[2:]] == ["", ""]
    assert all(job.done and job.summary()["rounds"] == 2 for job in jobs[2:])
    assert len(processes) <= 3
    for worker in processes:
        worker.join(60)
    codes = [worker.exitcode for worker in processes]
    assert codes.count(0) == len(codes) - 1, codes  # they end by themselves: no leaked semaphores


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process is forked")
def test_a_worker_returns_errors_that_are_no_exceptions_and_goes_on(monkeypatch):
    """As pyo3's PanicException: else the run's error would be that its process ended."""

    class Panic(BaseException):
        pass

    def carry_out(apps, config):
        raise Panic(config)

    monkeypatch.setattr(job_worker, "run_in_process", carry_out)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    worker = fork.Process(target=job_worker.work, args=(theirs, logging.ERROR), daemon=True)
    worker.start()
    theirs.close()
    for text in ("first", "second"):
        ours.send((None, text))
        assert ours.recv().startswith(f"Panic: {text} (")
    worker.kill()
    worker.join()


class Pipe:
    """Carries out a job at once, in place of a worker process."""

    def __init__(self, carry_out):
        self.carry_out = carry_out

    def send(self, task):
        self.carry_out(task[1])

    def recv(self):
        return ""

    def close(self):
        pass


def finish(job, **changes):
    """What another command leaves that has finished a run in the job's folder."""
    write_configuration(job.folder, job.config | changes)
    (job.folder / "summary.json").write_text('{"finished": true}')


@pytest.mark.parametrize("engine", ["in-process", "pool", "flower"])
def test_a_run_that_another_command_has_finished_meanwhile_is_kept(engine, tmp_path, monkeypatch):
    """The second run's folder gets the same run while the first one is carried out, the third one's
    a run of another learning rate."""
    jobs = make_jobs(SMALL, ["fedavg", "fedper", "local"], [0], tmp_path)
    carried_out = []

    def carry_out(config, *_):
        carried_out.append(config["method"])
        for job in jobs:
            job.folder.mkdir(exist_ok=True)
        finish(jobs[1])
        finish(jobs[2], lr=0.7)

    if engine == "in-process":
        run_in_turn(jobs, carry_out, lambda _: None)
    elif engine == "pool":
        pipe = Pipe(carry_out)
        worker = SimpleNamespace(join=lambda *_: None)
        monkeypatch.setattr(job_pool, "_start_worker", lambda: (pipe, worker))
        monkeypatch.setattr(job_pool, "longest_first", list)
        monkeypatch.setattr(multiprocessing.connection, "wait", lambda pipes, seconds: pipes)
        run_as_processes(jobs, 1, APPS, lambda _: None)
    else:
        link = Busy([1] * 3)
        link.submit = lambda config, federation: carry_out(config)
        monkeypatch.setattr(flower, "superlink", lambda log: link)
        monkeypatch.setattr(flower, "flower_runs", lambda jobs: [[job] for job in jobs])
        monkeypatch.setattr(flower, "STATUS_SECONDS", 0.0)
        monkeypatch.setattr(flower, "POLL_SECONDS", 0.0)
        run_on_flower(jobs, 1, 0.0, lambda _: None)
    assert carried_out == ["fedavg"]
    assert all(job.done for job in jobs)
    assert jobs[1].error == ""
    assert "of another configuration" in jobs[2].error
    assert "(lr is 0.7 there, 0.3 here); choose another --output" in jobs[2].error
    assert jobs[2].summary() == {"finished": True}


@pytest.mark.parametrize("since", [False, True])
def test_a_run_is_kept_if_it_was_finished_since_the_plan(since, tmp_path, monkeypatch):
    """One that was there before is repeated, as by --fresh: the plan has decided that."""
    jobs = make_jobs(SMALL, ["fedavg"], [0], tmp_path)
    jobs[0].folder.mkdir()
    finish(jobs[0])
    if not since:
        jobs = make_jobs(SMALL, ["fedavg"], [0], tmp_path)
    carried_out = []
    monkeypatch.setattr(engines, "run_in_process", lambda *arguments: carried_out.append(1))
    run_jobs(jobs, "in-process", APPS, follow=lambda _: None)
    assert jobs[0].done
    assert bool(carried_out) != since
    assert bool(jobs[0].summary()) == since


def test_nothing_is_removed_if_another_process_uses_one_of_the_folders(tmp_path):
    jobs = make_jobs(SMALL, ["fedavg", "fedper"], [0], tmp_path)
    for job in jobs:
        job.folder.mkdir()
    (jobs[0].folder / "metrics.jsonl").touch()
    with locked(jobs[1].folder), pytest.raises(BlockingIOError, match="another process uses"):
        run_jobs(jobs, "in-process", APPS, follow=lambda _: None)
    assert (jobs[0].folder / "metrics.jsonl").exists()


def test_a_look_at_a_folder_takes_it_from_nobody(tmp_path):
    """`fedapps status` holds the lock for a moment."""
    look = FileLock(tmp_path / LOCK, thread_local=False)
    look.acquire()
    threading.Timer(0.02, look.release).start()
    with locked(tmp_path):
        assert not look.is_locked


def test_runs_that_take_longest_begin_first(tmp_path):
    """A round of FedTTA++ takes as long as five of FedAvg; equal ones keep their order."""
    methods = ["fedavg", "fedper", "fedavg rounds=4", "fedtta++", "tent", "fedavg rounds=40"]
    work = longest_first(make_jobs(SMALL | {"rounds": 2}, methods, [0], tmp_path))
    assert [job.method for job in work] == [
        "fedavg rounds=40", "fedtta++", "fedavg rounds=4", "fedavg", "fedper", "tent"
    ]  # fmt: skip


def test_one_flower_run_serves_methods_under_one_configuration(tmp_path):
    jobs = make_jobs(defaults(), ["fedavg", "tent", "tent lr=0.5"], [0, 1], tmp_path)
    names = [[job.name for job in group] for group in flower_runs(jobs)]
    assert names == [
        ["fedavg-seed0", "tent-seed0"], ["tent,lr=0.5-seed0"],
        ["fedavg-seed1", "tent-seed1"], ["tent,lr=0.5-seed1"],
    ]  # fmt: skip
    for job in jobs:  # each starts from the model of its own earlier run
        job.config["from-dir"] = str(job.folder)
    assert flower_runs(jobs) == [[job] for job in sorted(jobs, key=lambda job: job.seed)]


def test_a_superlink_that_never_answers_is_an_error(tmp_path, monkeypatch):
    command = tmp_path / "flwr"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setattr(flower, "COMMANDS", tmp_path)
    monkeypatch.setattr(flower, "COMMAND_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match="flwr ls had no answer in 1 seconds"):
        flower.Flwr(tmp_path / "home", "one").status(7)


class Busy:
    """A SuperLink that does not answer some polls."""

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


@pytest.mark.parametrize(
    ("answers", "survived"), [([0, 0, 0, 1] * 2, True), ([0, 1, 0, 0, 0, 0], False)]
)
def test_three_failed_polls_in_a_row_do_not_end_a_sweep(answers, survived, tmp_path, monkeypatch):
    monkeypatch.setattr(flower, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(flower, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(flower, "superlink", lambda log: Busy(answers))
    jobs = make_jobs(SMALL, ["fedavg", "fedavg lr=0.1"], [0], tmp_path)
    if survived:
        run_jobs(jobs, "flower", APPS, follow=lambda _: None)
        assert [job.error for job in jobs] == ["the run finished:completed"] * 2
    else:
        with pytest.raises(RuntimeError, match="flwr ls had no answer"):
            run_jobs(jobs, "flower", APPS, follow=lambda _: None)
        assert [job.done for job in jobs] == [True, False]


def test_a_process_looks_after_its_parent_before_it_imports_what_takes_time():
    """Its parent may be killed meanwhile; torch alone takes seconds on a busy machine."""
    words = "import sys, fedapps.engines.worker_process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "flwr", "psutil"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("import fedapps\nfedapps.run()\n", 'script.py needs the line if __name__ == "__main__":'),
        ('if __name__ == "__main__":\n    fedapps.run()\n', ""),
    ],
)
def test_a_script_whose_calls_begin_anew_in_each_process_is_told(
    text, advice, tmp_path, monkeypatch
):
    """Each worker process imports the script, as Python's multiprocessing does."""
    script = tmp_path / "script.py"
    script.write_text(text)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    found = job_pool._advice()
    assert advice in found and bool(found) == bool(advice)
