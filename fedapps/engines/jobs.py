"""A job is one run: its configuration, its progress and its outcome. `check_engine` checks jobs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from clients.core.protocol import FewShot
from fedapps.engines import check_engine_name
from fedapps.files import ERRORS
from fedapps.methods import METHODS
from fedapps.saved import read_json
from fedapps.settings.config import Config
from fedapps.settings.saved_configurations import differences, unchecked_configuration

POLL_SECONDS = 0.25  # between two looks at the runs
EXIT_SECONDS = 5.0  # to reach a pause, to write an error, or to end without a job


class Apps(NamedTuple):
    """The two halves of the Flower app: functions of modules, which worker processes and Ray's
    actors import by name."""

    run: Callable[[Grid, Config, str], Any]  # carries out a run over the grid of an engine
    client_app: Callable[[], ClientApp]


@dataclass
class Job:
    """One run: its whole configuration and its outcome."""

    method: str  # may include settings: "fedembed assignment=som"
    seed: int
    config: Config
    folder: Path
    error: str = ""
    done: bool = False
    rounds: int = 0  # reported so far
    seconds: float = 0.0  # of these rounds
    changed_file: str = ""  # of data or code, that has changed since the run began
    _lines: int = field(default=0, repr=False)
    _planned: tuple[int, int] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Keep which summary was in the folder when the job was planned."""
        self._planned = self._summary_state()

    def _summary_state(self) -> tuple[int, int] | None:
        """The size and the time of the last change of the run's summary; None without one."""
        try:
            state = (self.folder / "summary.json").stat()
        except OSError:
            return None
        return state.st_size, state.st_mtime_ns

    @property
    def has_new_summary(self) -> bool:
        """Whether the folder has a summary that was not there when the job was planned."""
        return self._summary_state() not in (None, self._planned)

    @property
    def name(self) -> str:
        """``<method>-seed<seed>``, also the folder's name."""
        return self.folder.name

    @property
    def total(self) -> int:
        """The number of rounds, with those in which labeled novel clients learn."""
        novel = METHODS[str(self.config["method"])].client.few_shot == FewShot.ROUNDS
        return int(self.config["rounds"]) + novel * int(self.config["novel-rounds"])

    def news(self) -> list[dict[str, Any]]:
        """The rounds that were reported since the last call, without damaged lines."""
        file = self.folder / "metrics.jsonl"
        if not file.is_file():
            return []
        complete = file.read_text("utf-8").rpartition("\n")[0]
        lines = complete.split("\n") if complete else []
        reports = []
        for line in lines[self._lines :]:
            report = _report(line)
            if report:
                reports.append(report)
        self._lines = len(lines)
        self.rounds += len(reports)
        self.seconds += sum(report.get("seconds", 0.0) for report in reports)  # absent: private
        return reports

    def summary(self) -> dict[str, Any]:
        """The run's summary, {} while it has none. Raises ValueError if it is damaged."""
        file = self.folder / "summary.json"
        if not file.is_file():
            return {}
        summary = read_json(file)
        if not isinstance(summary, dict):
            raise ValueError(f"{file} is damaged: it holds no table")
        return summary

    def undone_rounds(self) -> int:
        """How many rounds the run has undone, by its summary."""
        return int(self.summary().get("undone_rounds") or 0)

    def failures(self) -> list[str]:
        """The causes in the run's errors.log."""
        file = self.folder / ERRORS
        return file.read_text("utf-8", "replace").strip().split("\n\n") if file.is_file() else []

    def close(self, error: str) -> None:
        """Mark the job as done; it failed with `error` unless its summary says otherwise."""
        summary = self.summary()
        if not summary.get("finished"):
            self.error = str(summary.get("error", error))
        self.done = True


def _report(line: str) -> dict[str, Any]:
    try:
        report = json.loads(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def finished_elsewhere(job: Job) -> bool:
    """Mark the job as done if another command has finished a run in its folder since this one was
    planned: its results are kept. If they have another configuration, the job has failed."""
    if not job.has_new_summary:
        return False
    try:
        if not job.summary().get("finished"):
            return False
        other = differences(unchecked_configuration(job.folder), job.config)
    except (OSError, ValueError):  # damaged: a run replaces it
        return False
    if other:
        job.error = (
            f"another command has finished a run of another configuration in {job.folder} "
            f"meanwhile ({other}); choose another --output"
        )
    job.done = True
    return True


def may_start(job: Job, jobs: Sequence[Job]) -> bool:
    """Whether the job may start: it waits for the first of the `jobs` that share its training,
    which trains for it."""
    folder = job.config["training-dir"]
    if not folder:
        return True
    first = next(other for other in jobs if other.config["training-dir"] == folder)
    return job is first or first.done


Follow = Callable[[list[Job]], None]  # called with the jobs a few times a second


def trains_in_cohorts(jobs: Sequence[Job]) -> bool:
    """Whether an unfinished job trains in cohorts."""
    return any(int(job.config["stacked-clients"]) > 1 for job in jobs if not job.done)


def check_engine(engine: str, jobs: Sequence[Job] = (), parallel: int = 1) -> None:
    """Raise ValueError for an unknown engine, or one that cannot carry out the unfinished `jobs`,
    `parallel` at a time."""
    check_engine_name(engine)
    if engine != "in-process" and trains_in_cohorts(jobs):
        raise ValueError(f"a cohort trains in one process: engine in-process, not {engine}")
    if engine == "ray" and min(parallel, sum(not job.done for job in jobs)) > 1:
        raise ValueError("ray gives all cores to one run; --jobs is for flower and in-process")
