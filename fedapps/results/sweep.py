"""Sweeps that continue: finished runs are skipped, the others resume."""

import logging
from collections.abc import Sequence
from pathlib import Path

from fedapps.common.file_states import FileState
from fedapps.engines.jobs import Job
from fedapps.files import FORMAT
from fedapps.results.schema import Summary, SummaryFile
from fedapps.saved import CHECKPOINTS
from fedapps.settings.config import Config, defaults, override
from fedapps.settings.own_files import newest_file, places_of_user
from fedapps.settings.saved_configurations import (
    configuration_file,
    differences,
    run_configuration,
    run_folders,
    unchecked_configuration,
    where_runs_are,
)
from fedapps.settings.variants import Variant

logger = logging.getLogger(__name__)


def keep_finished(jobs: Sequence[Job]) -> None:
    """Mark jobs as done whose folder holds their finished run: the same configuration, in the
    present format of results. Warn of data and code that changed since the run began.

    Raises ValueError if a folder holds a run of another configuration, finished or with a
    checkpoint, or a finished one whose configuration cannot be read: it must not be lost by
    accident."""
    begun: list[Job] = []
    for job in jobs:
        done = finished(job.folder)
        if done is None and _has_finished(job.folder):
            raise ValueError(
                f"{job.folder} holds a finished run whose config.toml is damaged or of another "
                "release; choose another --output, or start over with --fresh"
            )
        check_same(job.folder, job.config, "choose another --output, or start over with --fresh")
        job.done = done is not None
        if done is not None or unfinished(job.folder) is not None:
            begun.append(job)
    _warn_of_changes(begun)


def check_same(folder: Path, config: Config, what_to_do: str) -> None:
    """Raise ValueError if `folder` holds a run of another configuration than `config`, finished or
    with a checkpoint: a new run would replace it."""
    for saved, what in ((finished(folder), "a finished"), (unfinished(folder), "an unfinished")):
        if saved is not None and (other := differences(saved, config)):
            raise ValueError(
                f"{folder} holds {what} run of another configuration ({other}); {what_to_do}"
            )


def _warn_of_changes(jobs: Sequence[Job]) -> None:
    """Name for each run a file of its data or code that is newer than the run's beginning, and keep
    it in the job.

    Runs that read the same files share one look at them."""
    newest: dict[str, FileState | None] = {}  # by the path of data, or a module's file
    for job in jobs:
        began_ns = (job.folder / "config.toml").stat().st_mtime_ns
        for place in places_of_user(job.config):
            key = str(place)
            if key not in newest:
                newest[key] = newest_file(place)
            file = newest[key]
            if file is not None and file.changed_ns > began_ns:
                job.changed_file = file.path
                what = "is kept" if job.done else "continues"
                logger.warning(
                    "%s %s, but %s has changed since it began; to start over: --fresh, or "
                    "fresh=True in Python",
                    job.folder, what, file.path,
                )  # fmt: skip
                break


def finished(folder: Path) -> Config | None:
    """The configuration of the finished run in `folder`; None if it cannot be read or has another
    format of results."""
    return _configuration(folder) if _has_finished(folder) else None


def _has_finished(folder: Path) -> bool:
    try:
        summary = SummaryFile.validate_json((folder / "summary.json").read_bytes())
    except (OSError, ValueError):  # missing or damaged
        return False
    return isinstance(summary, Summary) and bool(summary.finished)


def unfinished(folder: Path) -> Config | None:
    """The same of a run that could resume from a checkpoint."""
    resumable = any((folder / CHECKPOINTS).glob("*.safetensors")) and finished(folder) is None
    return _configuration(folder) if resumable else None


def _configuration(folder: Path) -> Config | None:
    try:
        config = configuration_file(folder)
        if config.pop("versions")["results"] != FORMAT:
            return None
        return override(defaults(), config, all_methods=False)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # missing, damaged, or with keys of another release


def begun_jobs(folder: Path) -> list[Job]:
    """The runs in `folder`, or the run whose folder it is, each to resume from its newest
    checkpoint; finished ones are done. Warns of changed data and code. Raises ValueError if there
    is none, or one that cannot be read."""
    jobs = [begun_job(run) for run in begun_folders(folder)]
    _warn_of_changes(jobs)
    return jobs


def begun_folders(folder: Path) -> list[Path]:
    """The folders of the runs in `folder`, or that folder itself. Raises ValueError if there is
    none."""
    if not (runs := run_folders(folder.resolve())):
        raise ValueError(
            f"{folder} holds no run that could go on: no config.toml in it{where_runs_are(folder)}"
        )
    return runs


def begun_job(run: Path, *, to_resume: bool = True) -> Job:
    """The run in the folder `run`, to resume. Unless it is `to_resume`, no code that it names is
    imported, and settings are not checked. Raises ValueError if its configuration is damaged."""
    read = run_configuration(run) if to_resume else unchecked_configuration(run)
    config = read | {
        "output-dir": str(run),
        "training-dir": "",  # the folder may have moved
        "resume": True,
    }
    method = str(Variant.of_folder(run, str(config["method"])))
    done = finished(run) is not None if to_resume else _has_finished(run)
    return Job(method, int(config["seed"]), config, run, done=done)
