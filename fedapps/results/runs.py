"""The runs that a folder holds. What cannot be read is told in a sentence, the rest is shown."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedapps.engines.jobs import Job
from fedapps.files import parse_json
from fedapps.results.kinds import CONFIG, FAILURE, ROUND, SUMMARY
from fedapps.settings.config import label_of


def read_runs(folder: Path) -> tuple[list[Job], list[str]]:
    """The runs of `folder`, by method and seed, and a sentence for each that is missing, damaged
    or none of ours. Raises ValueError if nothing is left to show."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name one that `fedapps run` wrote to")
    single = (folder / "config.toml").is_file()
    runs, problems = [], []
    for place in (
        [folder.resolve()] if single else sorted(f for f in folder.iterdir() if f.is_dir())
    ):
        if place.name.startswith("."):
            continue
        try:
            run = _read(place)
        except ValueError as error:
            problems.append(f"{place.name}: {error}")
            continue
        runs.append(run)
        problems += [f"{place.name}: {told}" for told in _doubts(run)]
    if not runs:
        raise ValueError("; ".join([f"{folder} holds no runs of fedapps", *problems]))
    return sorted(runs, key=lambda job: (job.method, job.seed)), problems + _missing(runs)


def rounds_of(job: Job) -> list[dict[str, Any]]:
    """The rounds of a run's metrics.jsonl, up to the first line that is damaged."""
    file = job.folder / "metrics.jsonl"
    rounds: list[dict[str, Any]] = []
    for line in file.read_text("utf-8", "replace").splitlines() if file.is_file() else []:
        try:
            report = parse_json(line)
        except ValueError:
            break
        if not ROUND(report):
            break
        rounds.append(report)
    return rounds


def versions_of(job: Job) -> dict[str, str]:
    """The libraries that a run was made with; {} where it does not tell."""
    file = job.folder / "config.toml"
    told = tomllib.loads(file.read_text("utf-8")) if file.is_file() else {}
    return {name: str(version) for name, version in told.get("versions", {}).items()}


def _read(folder: Path) -> Job:
    """The run in `folder`. Raises ValueError that says what is wrong with it."""
    for name in ("config.toml", "summary.json"):
        if not (folder / name).is_file():
            raise ValueError(f"no {name}; no run, or one that was never evaluated")
    try:
        config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
        summary = parse_json((folder / "summary.json").read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # errors of TOML, JSON and UTF-8 are the former
        raise ValueError(f"damaged: {error}") from error
    if not CONFIG(config) or not (FAILURE(summary) or SUMMARY(summary)):
        raise ValueError("no run of fedapps")
    method = label_of(folder, config["method"])
    return Job(method, config["seed"], config, folder, summary.get("error", ""))


def _doubts(job: Job) -> list[str]:
    """What is odd about a run that can be shown."""
    summary, found = job.summary(), []
    if summary.get("finished") is False and not job.error:
        found.append("did not finish")
    told, read = summary.get("rounds", 0), len(rounds_of(job))
    if read < told:
        found.append(f"metrics.jsonl is damaged or cut short: {read} of {told} rounds")
    return found


def _missing(jobs: Sequence[Job]) -> list[str]:
    """Methods that lack a seed which others have."""
    seeds = {job.seed for job in jobs}
    found = []
    for method in dict.fromkeys(job.method for job in jobs):
        lacking = seeds - {job.seed for job in jobs if job.method == method}
        found += [f"{method}: no run of seed {seed}" for seed in sorted(lacking)]
    return found
