"""Progress of `fedapps run`: live bars in a terminal; elsewhere a line for each evaluation."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from fedapps.console import say, visible

if TYPE_CHECKING:
    from fedapps.engines.jobs import Job


class Display:
    """A bar per job with its rounds, loss and last scores, and a bar for all jobs with
    the time left when `parallel` jobs run side by side. Use as a context.

    A console that is no terminal, as in a batch job's log, gets a line for each evaluation at
    once."""

    def __init__(self, jobs: Sequence["Job"], console: Console, parallel: int = 1) -> None:
        self._jobs = jobs
        self._parallel = parallel
        self._console = console
        self._progress = Progress(  # where it is narrow, names and news take several lines
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}", table_column=Column()),
            console=console,
            auto_refresh=console.is_terminal or console.is_jupyter,  # elsewhere no bar is live
        )
        self._tasks = {}  # a bar by the job's name
        self._news: dict[
            str, dict[str, str]
        ] = {}  # what its bar shows, by the job's name, by topic
        self._undone = Counter[str]()  # rounds, by the job's name
        total = 0
        for job in jobs:
            # The bar's clock starts with the job's first report: before, the job waits its turn.
            task = self._progress.add_task(job.name, total=job.total, start=False, news="")
            self._tasks[job.name] = task
            self._news[job.name] = {"kept": "kept"} if job.done else {}
            total += job.total
        self._all = self._progress.add_task("all", total=total, news="")

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.follow(self._jobs)  # Ctrl-C may have come before the last news was shown
        finally:
            self._progress.stop()

    def follow(self, jobs: Iterable["Job"]) -> None:
        """Show what the jobs reported since the last call."""
        for job in jobs:
            task = self._tasks[job.name]
            news = self._news[job.name]
            for report in job.news():
                self._progress.start_task(task)
                self._progress.update(task, completed=report["round"])
                news |= shown(report)
                if report.get("undone"):
                    self._undone[job.name] += 1
                    self._say_undone(job, report["round"])
                if "evaluation" in report and "kept" not in news:
                    self._log(job, f"round {report['round']}/{job.total}", *news.values())
            if job.error and "error" not in news:
                news["error"] = "[red]failed[/red]"
                self._log(job, "failed:", escape(job.error))
            if job.done:
                self._progress.stop_task(task)
            self._progress.update(task, news="  ".join(news.values()))
        completed = 0
        for job in self._jobs:
            # A finished job counts in full, even if it stopped early.
            completed += job.total if job.done else min(job.rounds, job.total)
        self._progress.update(self._all, completed=completed)
        seconds = seconds_left(self._jobs, self._parallel)
        if seconds is not None:
            left = timedelta(seconds=round(seconds))
            self._progress.update(self._all, news=f"{left} left" if seconds else "")

    def _say_undone(self, job: "Job", round_: int) -> None:
        """Keep the number of undone rounds in the job's news; log each one at once."""
        news = self._news[job.name]
        count = self._undone[job.name]
        rounds = "round" if count == 1 else "rounds"
        news["undone"] = f"[red]{count} {rounds} undone[/red]"
        if "kept" not in news:
            why = "NaN or infinity would have come into the model"
            self._log(job, f"round {round_}/{job.total} [red]is undone[/red]: {why}")

    def _log(self, job: "Job", *words: str) -> None:
        """Print a line about a job where there are no live bars; the console flushes it."""
        if not self._console.is_terminal:
            say(self._console, Text.from_markup("  ".join((escape(job.name), *words))))


def shown(report: dict[str, Any]) -> dict[str, str]:
    """What a person sees of a round, by topic, with rich's markup."""
    news = {}
    if report.get("loss") is not None:
        news["loss"] = f"loss {report['loss']:.3f}"
    numbers = report.get("evaluation", {})
    for role, word in (("train", "training"), ("novel", "novel")):
        if (accuracy := numbers.get(f"{role}-accuracy")) is not None:
            news[role] = f"{word} {100 * accuracy:.1f} %"
        elif (error := numbers.get(f"{role}-rmse")) is not None:
            news[role] = f"{word} RMSE {error:.4g}"
    if "train-f1" in numbers:
        news["f1"] = f"F1 {numbers['train-f1']:.3f}"
    if report.get("undone"):
        news["undone"] = "[red]this round is undone[/red]"
    for name in ("clipped", "recounted"):
        if report.get(name):
            news[name] = f"{name} {report[name]}"
    if report.get("not-finite"):
        lost = escape(visible(", ".join(map(str, report["not-finite"]))))
        news["not-finite"] = f"[red]not finite, left out: {lost}[/red]"
    if report.get("dropped"):
        causes = ", ".join(f"{cause} {count}" for cause, count in report["dropped"].items())
        news["dropped"] = f"[red]dropped: {escape(visible(causes))}[/red]"
    return news


def seconds_left(jobs: Sequence["Job"], parallel: int) -> float | None:
    """Time that the jobs still take, `parallel` at once; None before the first round.

    A job without rounds counts with the mean speed of all rounds so far."""
    rounds = sum(job.rounds for job in jobs)
    if rounds == 0:
        return None
    mean_seconds = sum(job.seconds for job in jobs) / rounds
    left = 0.0
    for job in jobs:
        if job.done:
            continue
        seconds_of_round = job.seconds / job.rounds if job.rounds else mean_seconds
        left += max(job.total - job.rounds, 0) * seconds_of_round
    return left / parallel
