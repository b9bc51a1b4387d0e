"""A pool of worker processes on this machine, which carry out jobs side by side."""

import atexit
import logging
import multiprocessing
import multiprocessing.connection
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedapps.common.signals import blocked, raise_swallowed
from fedapps.engines import worker_process
from fedapps.engines.jobs import (
    EXIT_SECONDS,
    POLL_SECONDS,
    Apps,
    Follow,
    Job,
    finished_elsewhere,
    may_start,
)
from fedapps.methods import METHODS


def run_as_processes(jobs: list[Job], parallel: int, apps: Apps, follow: Follow) -> None:
    """Run the jobs in `parallel` processes, longest first. A process takes one job after the
    other; if it dies, only its current job fails."""
    waiting = longest_first(jobs)
    idle = [_start_worker() for _ in range(parallel)]
    running: dict[Any, tuple[Job, Any]] = {}  # job and process by the pipe that returns the error
    try:
        while waiting or running:
            while len(running) < parallel:
                ready_jobs = [job for job in waiting if may_start(job, jobs)]
                if not ready_jobs:
                    break
                job = ready_jobs[0]
                waiting.remove(job)
                if finished_elsewhere(job):
                    continue
                pipe, process = idle.pop() if idle else _start_worker()
                with suppress(BrokenPipeError):  # the process has died; `recv` will notice
                    pipe.send((apps, job.config))
                running[pipe] = (job, process)
            ready: list[Any] = multiprocessing.connection.wait(list(running), POLL_SECONDS)
            for pipe in ready:
                job, process = running.pop(pipe)
                try:
                    job.error = str(pipe.recv())
                    idle.append((pipe, process))
                except (EOFError, ConnectionResetError):
                    process.join()
                    job.error = _error_of_death(process.exitcode)
                job.done = True
            raise_swallowed()
            follow(jobs)
    finally:
        for _, process in running.values():
            process.terminate()
        for pipe, process in idle:
            pipe.close()  # the process ends, and removes its semaphores
            atexit.register(process.join, EXIT_SECONDS)  # otherwise multiprocessing kills it there


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """The jobs by falling effort, so that no core waits long for the last one."""

    def cost(job: Job) -> float:
        return METHODS[str(job.config["method"])].relative_cost * job.total

    return sorted(jobs, key=cost, reverse=True)


def _error_of_death(exit_code: int) -> str:
    """The error of a job whose process has died."""
    error = f"its process ended with code {exit_code}"
    if exit_code == 1:  # an error of Python
        error += _advice()
    return error


def _advice() -> str:
    """What a script lacks whose calls begin anew in each worker process, which imports the script;
    "" for other programs."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    try:
        script = Path(file).read_text("utf-8") if file else "__main__"
    except (OSError, ValueError):
        return ""
    if "__main__" in script:
        return ""
    return (
        f'; {file} needs the line if __name__ == "__main__": above its calls, since runs side by '
        "side are processes that import it; or write jobs=1"
    )


def _start_worker() -> tuple[Connection, Any]:
    """A process that waits for jobs, and the pipe to it."""
    spawn = multiprocessing.get_context("spawn")
    parent_end, worker_end = spawn.Pipe()
    level = logging.getLogger("flwr").level
    process = spawn.Process(target=worker_process.start, args=(worker_end, level), daemon=True)
    with blocked([signal.SIGINT]):  # else Ctrl-C would print a traceback while it imports
        process.start()
    worker_end.close()
    return parent_end, process
