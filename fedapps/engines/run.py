"""Carry out jobs on an engine, each into its folder."""

from contextlib import suppress

from fedapps.common.new_files import remove_folder
from fedapps.common.threads import one_thread
from fedapps.engines.flower import run_on_flower
from fedapps.engines.job_pool import Apps, Follow, Job, check_engine
from fedapps.engines.process import run_as_processes, run_in_process, run_in_turn
from fedapps.engines.ray_engine import run_on_ray
from fedapps.files import ERRORS, locked, write_configuration
from fedapps.saved import CHECKPOINTS


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
    finished, jobs = [job for job in jobs if job.done], [job for job in jobs if not job.done]
    follow(finished)
    for job in finished:  # a run that was killed at its end may have left some
        remove_folder(job.folder / CHECKPOINTS)
    if not jobs:
        return
    for job in jobs:
        _prepare(job)
    parallel = min(parallel, len(jobs))
    if debug:
        for job in jobs:
            run_in_process(apps, job.config, debug=True)
            job.done = True
    elif engine == "flower":
        run_on_flower(jobs, parallel, gpus_per_client, follow)
    elif engine == "ray":
        run_on_ray(jobs, apps, gpus_per_client, ray_address, follow)
    elif parallel > 1:
        run_as_processes(jobs, parallel, apps, follow)
    else:
        run_in_turn(jobs, lambda config, pause: run_in_process(apps, config, pause), follow)


def _prepare(job: Job) -> None:
    """Make the job's folder, without the results of an earlier run."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with locked(job.folder):
        for name in ("summary.json", "metrics.jsonl", ERRORS):
            (job.folder / name).unlink(missing_ok=True)
        if not (job.folder / CHECKPOINTS).is_dir():  # --resume needs the file even if no run began
            with suppress(OSError):  # the run itself reports a full disk
                write_configuration(job.folder, job.config)
