"""What a person sees of a run: live progress, and a table at the end."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedapps.console import visible
from fedapps.engines.jobs import Job
from fedapps.methods import METHODS
from fedapps.results.sweep import seconds_left

NOT_SERVED = "cannot without labels"
FAILED = "failed"


class Display:
    """A bar per job: rounds done, loss, the last accuracies or F1; one of all of them, and how
    long the rest will take, `parallel` jobs at once. Use as a context."""

    def __init__(self, jobs: Sequence[Job], console: Console, parallel: int = 1) -> None:
        self._jobs, self._parallel = jobs, parallel
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
        )
        self._tasks = {
            job.name: self._progress.add_task(job.name, total=job.total, start=False, news="")
            for job in jobs
        }
        self._news: dict[str, dict[str, str]] = {
            job.name: {"kept": "kept"} if job.done else {} for job in jobs
        }
        rounds = sum(job.total for job in jobs)
        self._all = self._progress.add_task("all", total=rounds, news="")

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.follow(self._jobs)  # Ctrl-C may have come before the last news was shown
        finally:
            self._progress.stop()

    def follow(self, jobs: Iterable[Job]) -> None:
        """Show what the jobs reported since the last call."""
        for job in jobs:
            task, news = self._tasks[job.name], self._news[job.name]
            for report in job.news():
                self._progress.start_task(task)
                self._progress.update(task, completed=report["round"])
                if report.get("loss") is not None:
                    news["loss"] = f"loss {report['loss']:.3f}"
                numbers = report.get("evaluation", {})
                for role, word in (("train", "training"), ("novel", "novel")):
                    accuracy = numbers.get(f"{role}-accuracy")
                    if accuracy is not None:
                        news[role] = f"{word} {100 * accuracy:.1f} %"
                if "train-f1" in numbers:
                    news["f1"] = f"F1 {numbers['train-f1']:.3f}"
                if report.get("dropped"):
                    news["dropped"] = f"[red]dropped {escape(visible(report['dropped']))}[/red]"
            if job.error:
                news["error"] = "[red]failed[/red]"
            if job.done:
                self._progress.stop_task(task)
            self._progress.update(task, news="  ".join(news.values()))
        planned = [job.total for job in self._jobs]
        gone = sum(
            total if job.done else min(job.rounds, total)
            for job, total in zip(self._jobs, planned, strict=True)
        )
        self._progress.update(self._all, completed=gone)
        if (seconds := seconds_left(self._jobs, self._parallel)) is not None:
            left = timedelta(seconds=round(seconds))
            self._progress.update(self._all, news=f"{left} left" if seconds else "")


@dataclass(frozen=True)
class Results:
    """The rows that a table of results shows, one per method."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str


def results(jobs: Sequence[Job]) -> Results:
    """One row per method; several seeds as mean ± standard deviation over seeds.

    Only columns that can tell something: no accuracy where no client has validation samples but F1
    is told, and nothing of novel clients where there are none."""
    summaries_of = {job.name: {} if job.error else job.summary() for job in jobs}
    told = summaries_of.values()
    scored = any("f1" in s.get("train", {}) for s in told)
    validated = any(s.get("train", {}).get("accuracy") is not None for s in told) or not scored
    joined = novel_clients(jobs)
    private = any("privacy" in s for s in told)
    bounded = any(_terms(s) for s in told)
    columns = ["method", *["training clients"] * validated, *["novel clients"] * joined]
    columns += [
        *["F1", "F1, users"] * scored,
        *["ε"] * private,
        *["êrr", "½ d̂", "êrr + ½ d̂"] * bounded,
    ]
    columns += ["rounds", "seconds", "MB down", "MB up"]
    rows = []
    for method, group in groupby(jobs, key=lambda job: job.method):
        summaries = [s for job in group if (s := summaries_of[job.name])]
        if not summaries:
            rows.append([method, FAILED, *[""] * (len(columns) - 2)])
            continue
        entry = METHODS.get(method.split()[0])  # of other people's nothing is imported here
        served = entry is None or entry.novel or any(s["novel"] for s in summaries)
        novel = _accuracy([s["novel"] for s in summaries]) if served else NOT_SERVED
        rows.append(
            [
                method,
                *[_accuracy([s["train"] for s in summaries])] * validated,
                *[novel] * joined,
                *[_f1(summaries, key) for key in ("f1", "f1_users") if scored],
                *[epsilon(summaries)] * private,
                *_bound(summaries) * bounded,
                str(summaries[0]["rounds"]),
                _seconds(summaries),
                _megabytes(summaries, "down"),
                _megabytes(summaries, "up"),
            ]
        )
    first, spread = jobs[0].config, _seeds(jobs) > 1
    notes = [
        *["training clients: validation accuracy"] * validated,
        *[f"novel clients: {_scored(jobs)}"] * joined,
        *["F1 of test samples: mean over sub-populations; over users"] * scored,
        *["ε (δ): spent in the whole run, each run by itself"] * private,
        *terms_of_privacy(jobs),
        *lost_replies(jobs),
        *["± standard deviation over seeds"] * spread,
        *["± standard error over clients"] * (joined and not spread),
        "MB per client and round",
    ]
    return Results(
        f"{first['dataset']}, {first['partition']}, {first['num-clients']} clients: "
        + ("accuracy in %, at the round that is best on validation" if validated else "last round"),
        columns,
        rows,
        "; ".join(notes),
    )


def _scored(jobs: Sequence[Job]) -> str:
    """Which samples of novel clients the table's accuracies count."""
    few = any(job.config.get("novel-shots") for job in jobs)
    return "all their samples" + " but those that they learn from" * few


def novel_clients(jobs: Sequence[Job]) -> bool:
    """Whether any of the runs has novel clients."""
    return any(float(job.config["train-fraction"]) < 1 for job in jobs)


def results_table(jobs: Sequence[Job]) -> Table:
    """The results as a terminal shows them."""
    return rich_table(results(jobs))


def rich_table(shown: Results) -> Table:
    """A table of texts as a terminal shows it."""
    table = Table(title=Text(visible(shown.title)), caption=Text(visible(shown.caption)))
    for column in shown.columns:
        justify: Literal["left", "right"] = "left" if column in ("method", "score") else "right"
        table.add_column(Text(visible(column)), justify=justify, overflow="fold")
    for row in shown.rows:
        table.add_row(*(Text(visible(cell), "red" if cell == FAILED else "") for cell in row))
    return table


def _f1(summaries: Sequence[dict[str, Any]], key: str) -> str:
    """Macro F1's mean over sub-populations or users, ± standard deviation over seeds."""
    values = [s["train"][key] for s in summaries if key in s["train"]]
    if not values:
        return "–"
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def epsilon(summaries: Sequence[dict[str, Any]]) -> str:
    """The largest ε(δ) over seeds; "TEST" where it holds for nobody who knows the seed."""
    told = [s["privacy"] for s in summaries if "privacy" in s]
    if not told:
        return "∞"
    test = " TEST" if any(t["generator"] != "system" for t in told) else ""
    return f"{max(t['epsilon'] for t in told):.2f} ({told[0]['delta']:g}){test}"


def terms_of_privacy(jobs: Sequence[Job]) -> list[str]:
    """What every ε stands for: unit, adversary, accountant and exclusions, once for each kind."""
    methods: dict[str, dict[str, None]] = {}
    for job in jobs:
        if not job.error and "privacy" in (summary := job.summary()):
            methods.setdefault(summary["privacy"]["terms"], {})[job.method] = None
    return [f"ε of {', '.join(names)}: {terms}" for terms, names in methods.items()]


def lost_replies(jobs: Sequence[Job]) -> list[str]:
    """How many training replies the runs that lost any have dropped, all seeds together."""
    lost: Counter[str] = Counter()
    for job in jobs:
        lost[job.method] += 0 if job.error else job.summary().get("dropped_replies") or 0
    told = ", ".join(f"{method} {count}" for method, count in lost.items() if count)
    return [f"training replies dropped: {told}"] if told else []


def _seconds(summaries: Sequence[dict[str, Any]]) -> str:
    """Mean over seeds; – where who took part is a secret."""
    told = [s["seconds"] for s in summaries if s["seconds"] is not None]
    return f"{np.mean(told):.0f}" if told else "–"


def _megabytes(summaries: Sequence[dict[str, Any]], way: str) -> str:
    """Mean over seeds; – where who took part is a secret."""
    told = [m for s in summaries if (m := s["megabytes_per_client_round"][way]) is not None]
    return f"{np.mean(told):.3f}" if told else "–"


def _terms(summary: dict[str, Any]) -> tuple[float, float] | None:
    """êrr_z(H) on the training clients' samples and mean ½ d̂ to the novel clients, if told."""
    error = (summary.get("train") or {}).get("training_error")
    distance = (summary.get("novel") or {}).get("half_distance")
    return None if error is None or distance is None else (error, distance)


def _bound(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Means over seeds of the bound's empirical terms and of their sum."""
    told = [terms for s in summaries if (terms := _terms(s))]
    if not told:
        return ["–"] * 3
    error, distance = np.mean(told, axis=0)
    return [f"{error:.3f}", f"{distance:.3f}", f"{error + distance:.3f}"]


def _seeds(jobs: Sequence[Job]) -> int:
    return len({job.seed for job in jobs})


def _accuracy(groups: Sequence[dict[str, Any] | None]) -> str:
    told = [g for g in groups if g is not None and g["accuracy"] is not None]
    if not told:
        return "–"
    values = [100 * g["accuracy"] for g in told]
    if len(values) > 1:
        return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
    sem = told[0].get("sem")
    return f"{values[0]:.2f}" + (f" ± {100 * sem:.2f}" if sem is not None else "")
