"""Carry out jobs on an engine, each into its folder."""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fedapps.common.errors import error_line
from fedapps.common.new_files import remove_folder
from fedapps.common.signals import exit_code, raise_swallowed
from fedapps.common.threads import one_thread
from fedapps.engines.flower import run_on_flower
from fedapps.engines.in_process_grid import Pause, run_in_process
from fedapps.engines.job_pool import run_as_processes
from fedapps.engines.jobs import (
    EXIT_SECONDS,
    POLL_SECONDS,
    Apps,
    Follow,
    Job,
    check_engine,
    finished_elsewhere,
)
from fedapps.engines.ray_engine import on_ray
from fedapps.files import ERRORS, check_free, locked, write_configuration
from fedapps.saved import CHECKPOINTS
from fedapps.settings.config import Config
from fedapps.trainings import forget, forget_outdated


class Interrupted(BaseException):
    """Ends the run of an interrupted command, between two messages."""


@one_thread()
def run_jobs(
    jobs: list[Job],
    engine: str,
    apps: Apps,
    *,
    parallel: int = 1,
    gpus_per_client: float = 0.0,
    ray_address: str = "",
    debug: bool = False,
    follow: Follow,
) -> None:
    """Run every job that is not done, `parallel` at a time.

    `ray_address` is that of a Ray cluster ("": Ray is started on this machine). A job that fails
    keeps its error in one line, and the others are run; with `debug`, in this process, the first
    error is raised. Raises ValueError as `check_engine`,
    RuntimeError if the engine does not start, OSError if another process uses a run's folder."""
    check_engine(engine, jobs, parallel)
    forget_outdated(job.config for job in jobs if not job.done)
    try:
        _run_jobs(jobs, engine, apps, parallel, gpus_per_client, ray_address, debug, follow)
    finally:
        _forget_trainings(jobs)


def _run_jobs(
    jobs: list[Job],
    engine: str,
    apps: Apps,
    parallel: int,
    gpus_per_client: float,
    ray_address: str,
    debug: bool,
    follow: Follow,
) -> None:
    finished = [job for job in jobs if job.done]
    jobs = [job for job in jobs if not job.done]
    follow(finished)
    for job in finished:  # a run that was killed at its end may have left some
        remove_folder(job.folder / CHECKPOINTS)
    for job in jobs:
        check_free(job.folder)  # before anything is removed
    for job in jobs:
        _prepare(job)
    jobs = [job for job in jobs if not job.done]
    if not jobs:
        return
    parallel = min(parallel, len(jobs))
    if debug:
        for job in jobs:
            run_in_process(apps, job.config, debug=True)
            job.done = True
    elif engine == "flower":
        run_on_flower(jobs, parallel, gpus_per_client, follow)
    elif engine == "ray":
        with on_ray(apps, gpus_per_client, ray_address) as (carry_out, check):
            run_in_turn(jobs, carry_out, follow, check)
    elif parallel > 1:
        run_as_processes(jobs, parallel, apps, follow)
    else:
        run_in_turn(jobs, lambda config, pause: run_in_process(apps, config, pause), follow)


def run_in_turn(
    jobs: list[Job],
    carry_out: Callable[[Config, Pause], None],
    follow: Follow,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Carry out one job after the other in a thread of this process.

    `carry_out` gets a function to call between messages. After Ctrl-C it raises `Interrupted`,
    which ends the run: Ray and torch abort a process that ends while they work. If a message takes
    longer, the process ends without their clean-up. Once `check` raises RuntimeError, the remaining
    jobs fail with its error."""
    interrupted = threading.Event()
    ended = threading.Event()

    def pause() -> None:
        if interrupted.is_set():
            raise Interrupted

    def carry_out_all() -> None:
        for job in jobs:
            if finished_elsewhere(job):
                continue
            try:
                check()
                carry_out(job.config, pause)
            except Interrupted:
                return
            # Also SystemExit, and what libraries derive from BaseException, as those in Rust do:
            # the other runs go on, and the error is shown at the end.
            except BaseException as error:
                job.error = error_line(error)
            job.done = True

    def work() -> None:
        try:
            carry_out_all()
        finally:
            ended.set()

    worker = threading.Thread(target=work, daemon=True)  # Ctrl-C must not wait for it
    worker.start()
    try:
        while worker.is_alive():
            worker.join(POLL_SECONDS)
            raise_swallowed()
            follow(jobs)
            try:
                check()
            except RuntimeError as error:
                # Print it now: Ray ends a process whose raylet has died.
                print(error, file=sys.stderr, flush=True)
                worker.join(EXIT_SECONDS)  # unless it hangs, the run notices and writes its error
                interrupted.set()  # if it goes on after all, its thread ends
                _close_unfinished(jobs, error_line(error))
                follow(jobs)
                return
    except KeyboardInterrupt as error:
        interrupted.set()
        # Before the wait, since a second Ctrl-C ends it.
        atexit.register(_end_at_once, ended, exit_code(error))
        ended.wait(EXIT_SECONDS)
        raise


def _close_unfinished(jobs: Sequence[Job], error: str) -> None:
    """Mark the jobs that have not ended as done; they failed with `error`."""
    for job in jobs:
        if not job.done:
            job.close(error)


def _end_at_once(ended: threading.Event, code: int) -> None:
    """End this process before torch aborts it, if the thread of its run still works."""
    if not ended.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_trainings(jobs: Sequence[Job]) -> None:
    """Remove the kept rounds of each training whose runs have all finished; a run that did not will
    take them when it resumes."""
    folders = {str(job.config["training-dir"]) for job in jobs}
    for job in jobs:
        if job.error or not job.done:
            folders.discard(str(job.config["training-dir"]))
    forget(folders)


def _prepare(job: Job) -> None:
    """Make the job's folder, without the results of an earlier run. One that another command has
    finished since the job was planned is kept."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with locked(job.folder):
        if finished_elsewhere(job):
            return
        for name in ("summary.json", "metrics.jsonl", ERRORS):
            (job.folder / name).unlink(missing_ok=True)
        if not (job.folder / CHECKPOINTS).is_dir():  # --resume needs the file even if no run began
            with suppress(OSError):  # the run itself reports a full disk
                write_configuration(job.folder, job.config)
