"""The in-process engine: runs in this process, one after the other, or in worker processes."""

import atexit
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from fedapps.common.errors import error_line
from fedapps.common.signals import exit_code
from fedapps.common.threads import use_one_thread
from fedapps.engines.in_process_grid import InProcessGrid, Pause, Simulated
from fedapps.engines.job_pool import POLL_SECONDS, Apps, Follow, Job
from fedapps.methods import METHODS
from fedapps.node.bridge import DEBUG
from fedapps.settings.config import Config

EXIT_SECONDS = 5.0  # to reach a pause, to write an error, or to end without a job


def run_in_process(
    apps: Apps, config: Config, pause: Pause = lambda: None, *, debug: bool = False
) -> None:
    """One run on the in-process grid; with `debug` the first error of a client is raised."""
    nodes = Simulated(int(config["num-clients"]), **{DEBUG: debug})
    grid = InProcessGrid(apps.client_app(), config, nodes, int(config["stacked-clients"]), pause)
    apps.run(grid, config, "in-process")


def run_in_turn(
    jobs: list[Job],
    carry_out: Callable[[Config, Pause], None],
    follow: Follow,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Carry out one job after the other in a thread of this process.

    `carry_out` gets a function to call between messages. After Ctrl-C it blocks until the process
    ends: Ray and torch abort a process that ends while they work. If a message takes longer, the
    process ends without their clean-up. Once `check` raises RuntimeError, the remaining jobs fail
    with its error."""
    interrupted, paused = threading.Event(), threading.Event()

    def pause() -> None:
        if interrupted.is_set():
            paused.set()
            threading.Event().wait()

    def work() -> None:
        for job in jobs:
            try:
                check()
                carry_out(job.config, pause)
            except (Exception, SystemExit) as error:  # it is shown at the end
                job.error = error_line(error)
            job.done = True

    worker = threading.Thread(target=work, daemon=True)  # Ctrl-C must not wait for it
    worker.start()
    try:
        while worker.is_alive():
            worker.join(POLL_SECONDS)
            follow(jobs)
            try:
                check()
            except RuntimeError as error:
                # Print it now: Ray ends a process whose raylet has died.
                print(error, file=sys.stderr, flush=True)
                worker.join(EXIT_SECONDS)  # unless it hangs, the run notices and writes its error
                for job in jobs:
                    if not job.done:
                        job.close(error_line(error))
                follow(jobs)
                return
    except KeyboardInterrupt as error:
        interrupted.set()
        atexit.register(
            _end_at_once, paused, exit_code(error)
        )  # first: a second Ctrl-C ends the wait
        paused.wait(EXIT_SECONDS)
        raise


def _end_at_once(paused: threading.Event, code: int) -> None:
    """End this process before torch aborts it, if the thread of its run still works."""
    if not paused.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_as_processes(jobs: list[Job], parallel: int, apps: Apps, follow: Follow) -> None:
    """Run the jobs in `parallel` processes, longest first. A process takes one job after the
    other; if it dies, only its current job fails."""
    waiting, idle = longest_first(jobs), [_start_worker() for _ in range(parallel)]
    running: dict[Any, tuple[Job, Any]] = {}  # job and process by the pipe that returns the error
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job, (pipe, process) = waiting.pop(0), idle.pop() if idle else _start_worker()
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
                    job.error = f"its process ended with code {process.exitcode}"
                job.done = True
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


def _start_worker() -> tuple[Connection, Any]:
    """A process that waits for jobs, and the pipe to it."""
    spawn = multiprocessing.get_context("spawn")
    parent_end, worker_end = spawn.Pipe()
    level = logging.getLogger("flwr").level
    process = spawn.Process(target=_work, args=(worker_end, level), daemon=True)
    process.start()
    worker_end.close()
    return parent_end, process


def _work(pipe: Connection, level: int) -> None:
    """Carry out jobs until the parent closes the pipe or ends; send each one's error, "" if it has
    none. `level` is that of Flower's log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    logging.getLogger("flwr").setLevel(level)
    use_one_thread()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    while True:
        try:
            apps, config = pipe.recv()
        except EOFError:  # there are no more jobs
            return
        try:
            run_in_process(apps, config)
            pipe.send("")
        except (Exception, SystemExit) as error:
            pipe.send(error_line(error))
