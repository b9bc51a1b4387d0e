"""Sweeps that go on: what is finished is kept, the rest is run, and the time that it takes."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from fedapps.engines.jobs import Job
from fedapps.files import CHECKPOINTS, FORMAT, read_json
from fedapps.settings.config import (
    Config,
    defaults,
    differences,
    label_of,
    override,
    run_configuration,
)


def keep_finished(jobs: Sequence[Job]) -> None:
    """Mark the jobs as done whose folder holds their finished run: the same configuration, in the
    present format of results.

    Raises ValueError where it holds a run of another configuration, finished or with a checkpoint:
    nobody asked to lose that one."""
    for job in jobs:
        ended, begun = finished(job.folder), unfinished(job.folder)
        for saved, what in ((ended, "a finished"), (begun, "an unfinished")):
            if saved is not None and (other := differences(saved, job.config)):
                raise ValueError(
                    f"{job.folder} holds {what} run of another configuration ({other}); choose "
                    "another --output, or start over with --fresh"
                )
        job.done = ended is not None


def finished(folder: Path) -> Config | None:
    """The configuration of the finished run that `folder` holds; None if it holds none that can
    be read, or one in another format of results."""
    try:
        summary = read_json(folder / "summary.json")
    except (OSError, ValueError):  # not there, or not whole
        return None
    ended = isinstance(summary, dict) and summary.get("finished")
    return _configuration(folder) if ended else None


def unfinished(folder: Path) -> Config | None:
    """The same of a run that could go on from a checkpoint."""
    begun = any((folder / CHECKPOINTS).glob("*.safetensors"))
    return _configuration(folder) if begun and finished(folder) is None else None


def _configuration(folder: Path) -> Config | None:
    try:
        config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
        return override(defaults(), config) if config.pop("versions")["results"] == FORMAT else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        # not there, not whole, or keys of another release
        return None


def begun_jobs(folder: Path) -> list[Job]:
    """The runs that were begun in `folder`, be it the folder of one, each to go on from its newest
    checkpoint; the finished ones are done. Raises ValueError if there is none."""
    folder = folder.resolve()
    runs = [f for f in (folder, *sorted(folder.glob("*-seed*"))) if (f / "config.toml").is_file()]
    if not runs:
        raise ValueError(f"{folder} holds no run that could go on: no config.toml in it")
    jobs = []
    for run in runs:
        config = run_configuration(run) | {"output-dir": str(run), "resume": True}
        method, seed = label_of(run, str(config["method"])), int(config["seed"])
        jobs.append(Job(method, seed, config, run, done=finished(run) is not None))
    return jobs


def seconds_left(jobs: Sequence[Job], parallel: int) -> float | None:
    """Time that the jobs still take, `parallel` at once: each at the speed of its own rounds so
    far, at the mean speed of all rounds if it has none; None before the first round."""
    if not (rounds := sum(job.rounds for job in jobs)):
        return None
    mean = sum(job.seconds for job in jobs) / rounds
    left = sum(
        max(job.total - job.rounds, 0) * (job.seconds / job.rounds if job.rounds else mean)
        for job in jobs
        if not job.done
    )
    return left / parallel
