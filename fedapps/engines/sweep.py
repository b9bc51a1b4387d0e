"""Sweeps that go on: what is finished is kept, the rest is run, and the time that it takes."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from fedapps.config import Config, defaults, override
from fedapps.engines.jobs import Job
from fedapps.results.recorder import FORMAT

PLACES: Config = {"output-dir": ""}  # where a run is, not what it computes


def keep_finished(jobs: Sequence[Job]) -> None:
    """Mark the jobs as done whose folder holds their finished run: the same configuration, in the
    present format of results.

    Raises ValueError where it holds a finished run of another configuration: nobody asked to lose
    that one."""
    for job in jobs:
        saved = finished(job.folder)
        if saved is None:
            continue
        if other := differences(saved, job.config):
            raise ValueError(
                f"{job.folder} holds a finished run of another configuration ({other}); choose "
                "another --output, or start over with --fresh"
            )
        job.done = True


def finished(folder: Path) -> Config | None:
    """The configuration of the finished run that `folder` holds; None if it holds none that can
    be read, or one in another format of results."""
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
        versions = config.pop("versions")
        if not summary.get("finished") or versions.get("results") != FORMAT:
            return None
        return override(defaults(), config)
    except (OSError, ValueError, KeyError):  # not there, not whole, or keys of another release
        return None


def differences(there: Config, here: Config) -> str:
    """The keys in which two configurations differ, with both values; "" if in none."""
    here = override(defaults(), here)
    other = [key for key in here if key not in PLACES and there[key] != here[key]]
    return ", ".join(f"{key} is {there[key]!r} there, {here[key]!r} here" for key in other)


def seconds_left(jobs: Sequence[Job], parallel: int) -> float | None:
    """Time that the jobs still take, `parallel` at once: each at the speed of its own rounds so
    far, at the mean speed of all rounds if it has none; None before the first round."""
    if not (rounds := sum(job.rounds for job in jobs)):
        return None
    mean = sum(job.seconds for job in jobs) / rounds
    left = sum(
        max(int(job.config["rounds"]) - job.rounds, 0)
        * (job.seconds / job.rounds if job.rounds else mean)
        for job in jobs
        if not job.done
    )
    return left / parallel
