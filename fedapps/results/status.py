"""The state of a run that goes on, read from its folder: round, clients, drops, scores, ε."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.text import Text

from fedapps.common.errors import printable
from fedapps.engines.jobs import Job
from fedapps.files import in_use
from fedapps.results.progress import shown
from fedapps.results.runs import read_rounds
from fedapps.results.schema import Round
from fedapps.results.sweep import begun_folders, begun_job

RUNNING, WAITING, FINISHED, FAILED, STOPPED = "running", "waits", "finished", "failed", "stopped"
DAMAGED = "damaged"
RECENT = 10  # rounds whose mean time is shown
MISSING = "missing"  # the cause of a reply that did not arrive in time


@dataclass
class RunStatus:
    """A run, its rounds, and the seconds since the last one."""

    job: Job
    state: str
    rounds: Sequence[Round]
    silent: float
    error: str = ""  # why it failed, or cannot be read

    @property
    def number(self) -> int:
        """The last round."""
        return self.rounds[-1].round if self.rounds else 0

    @property
    def total(self) -> int:
        """The number of rounds, without those of novel clients if the method is code that may not
        be imported."""
        try:
            return self.job.total
        except ValueError:
            return int(self.job.config["rounds"])

    @property
    def round_seconds(self) -> float | None:
        """Mean seconds of the last rounds; None where no round has a time: privacy hides it."""
        times = [r.seconds for r in self.rounds[-RECENT:] if r.seconds is not None]
        return sum(times) / len(times) if times else None

    def lines(self) -> list[str]:
        """What a person reads."""
        return [
            f"{self.job.name}: {self._head()}",
            *self._clients(),
            *self._scores(),
            *self._privacy(),
        ]

    def _head(self) -> str:
        words = [self.state, f"round {self.number} of {self.total}"]
        seconds = self.round_seconds
        if seconds is not None:
            words.append(f"{seconds:.3g} s a round")
        if self.state == RUNNING:
            if seconds is not None:
                left = (self.total - self.number) * seconds
                words.append(f"about {timedelta(seconds=round(left))} left")
            if self.rounds:
                words.append(f"last round {timedelta(seconds=round(self.silent))} ago")
        if self.error:
            words.append(self.error)
        return ", ".join(words)

    def _clients(self) -> list[str]:
        """Who answered in the last round; late and dropped replies of all rounds."""
        if not self.rounds or self.rounds[-1].sampled is None:
            return []
        last = self.rounds[-1]
        dropped = Counter[str]()
        late = 0
        used = 0
        for round_ in self.rounds:
            late += round_.late
            used += round_.late_used
            dropped.update(round_.dropped)
            dropped.update(round_.evaluation_dropped)
        words = [f"{last.valid} of {last.sampled} answered"]
        if last.present is not None:
            words.append(f"{last.present} present")
        # A round waits until its timeout and misses the late ones, or ends without them.
        late += dropped.pop(MISSING, 0)
        words.append(f"late {late} ({used} used)" if used else f"late {late}")
        causes = [f"{cause} {count}" for cause, count in sorted(dropped.items())]
        words.append(f"dropped: {', '.join(causes) or 'none'}")
        return [f"  clients: {', '.join(words)}"]

    def _scores(self) -> list[str]:
        for round_ in reversed(self.rounds):
            if round_.evaluation:
                news = shown({"evaluation": round_.evaluation})
                words = Text.from_markup(", ".join(news.values())).plain
                return [f"  round {round_.round}: {words}"]
        return []

    def _privacy(self) -> list[str]:
        for round_ in reversed(self.rounds):
            if round_.epsilon is not None:
                return [f"  privacy: ε {round_.epsilon:.3g} spent"]
        return []


def status_of(folder: Path) -> tuple[list[RunStatus], list[str]]:
    """The state of the run in `folder`, or of the runs in it, and a sentence for each one whose
    configuration is damaged. Raises ValueError if it holds none."""
    jobs: list[Job] = []
    problems: list[str] = []
    for run in begun_folders(folder):
        try:
            jobs.append(begun_job(run, to_resume=False))
        except ValueError as error:
            problems.append(f"{run.name}: {error}")
    active = {job.name: in_use(job.folder) for job in jobs}
    others_run = any(active.values())
    statuses = []
    for job in jobs:
        state, reason = _state_of(job, active[job.name], others_run)
        silent = 0.0
        with suppress(OSError):  # no round yet
            silent = time.time() - (job.folder / "metrics.jsonl").stat().st_mtime
        rounds = read_rounds(job.folder)
        statuses.append(RunStatus(job, state, rounds, max(0.0, silent), reason))
    return statuses, problems


def _state_of(job: Job, is_active: bool, others_run: bool) -> tuple[str, str]:
    """The state of a run, and why it failed or cannot be read."""
    if job.done:
        return FINISHED, ""
    if is_active:
        return RUNNING, ""
    try:
        summary = job.summary()
    except ValueError as error:
        return DAMAGED, str(error)
    if "error" in summary:
        return FAILED, str(summary["error"])
    if others_run and not (job.folder / "metrics.jsonl").is_file():
        return WAITING, ""
    return STOPPED, ""


def status_lines(folder: Path) -> tuple[list[str], bool]:
    """What a person reads of the runs in `folder`, and whether one of them runs or waits. Raises
    ValueError if it holds none."""
    statuses, problems = status_of(folder)
    lines: list[str] = []
    goes_on = False
    for status in statuses:
        lines += [printable(line) for line in status.lines()]
        goes_on |= status.state in (RUNNING, WAITING)
    lines += [printable(problem) for problem in problems]
    return lines, goes_on
