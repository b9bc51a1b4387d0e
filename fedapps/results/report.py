"""The HTML report of a folder of runs: the table, learning curves, clients one by one, settings.

One file that needs no other and no network: figures are drawn by matplotlib into the page."""

import io
import tomllib
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapps.config import defaults
from fedapps.engines.jobs import Job
from fedapps.files import write_text
from fedapps.results.runs import rounds_of
from fedapps.results.table import novel_clients, results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "report.html"
ROLES = {"train": "training clients", "novel": "novel clients"}
OF_THE_RUN = {"method", "seed", "output-dir", "versions"}  # settings that the page shows elsewhere
BLACK = {"color": "black"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } caption { caption-side: bottom; color: #555 }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left } .error { color: #b00 }
svg { max-width: 100%; height: auto }
"""


def write_report(jobs: Sequence[Job], folder: Path, problems: Sequence[str] = ()) -> Path:
    """Write the report of the runs to `folder`, `problems` told in it; returns the file."""
    shown = results(jobs)
    reports = {job.name: rounds_of(job) for job in jobs}
    parts = [
        f"<h1>{escape(shown.title)}</h1>",
        _table(shown.columns, shown.rows, shown.caption),
        *(f'<p class="error">{escape(f"{j.name} failed: {j.error}")}</p>' for j in jobs if j.error),
        *(f'<p class="error">{escape(problem)}</p>' for problem in problems),
    ]
    if any("evaluation" in report for rounds in reports.values() for report in rounds):
        parts += ["<h2>By round</h2>", _svg(curves(jobs, reports))]
    if any(f1_of(job) for job in jobs):
        parts += ["<h2>F1 by sub-population</h2>", _svg(sub_populations(jobs))]
    one_by_one = clients(jobs)
    if any(axis.lines for axis in one_by_one.axes):
        parts += ["<h2>Clients one by one, at the best round</h2>", _svg(one_by_one)]
    parts += ["<h2>Settings</h2>", *_settings(jobs)]
    head = f'<meta charset="utf-8"><title>{escape(shown.title)}</title><style>{STYLE}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'
    write_text(folder / NAME, page)
    return folder / NAME


def curves(jobs: Sequence[Job], reports: dict[str, list[dict[str, Any]]]) -> "Figure":
    """Accuracy of training and of novel clients by round, the mean over seeds and their range.

    F1 where a method is scored by that alone."""
    figure, axes = _axes(jobs)
    for colour, (method, group) in enumerate(groupby(jobs, key=lambda job: job.method)):
        runs = [reports[job.name] for job in group]
        for role, axis in axes.items():
            told: dict[int, list[float]] = {}
            for report in (r for rounds in runs for r in rounds):
                numbers = report.get("evaluation", {})
                score = numbers.get(f"{role}-accuracy", numbers.get(f"{role}-f1"))
                if score is not None:
                    told.setdefault(report["round"], []).append(100 * score)
            if told:
                x, values = sorted(told), [told[n] for n in sorted(told)]
                low, high = map(min, values), map(max, values)
                mean = [float(np.mean(v)) for v in values]
                axis.plot(x, mean, color=f"C{colour}", marker=".", label=method)
                axis.fill_between(x, list(low), list(high), color=f"C{colour}", alpha=0.2)
    for axis in axes.values():
        axis.set_xlabel("round")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if axis.lines:
            axis.legend()
    return figure


def clients(jobs: Sequence[Job]) -> "Figure":
    """Each client's accuracy as a dot, quartiles as a box; all seeds together."""
    figure, axes = _axes(jobs)
    names = list(dict.fromkeys(job.method for job in jobs))
    for role, axis in axes.items():
        for place, method in enumerate(names):
            told = [
                100 * client["accuracy"]
                for job in jobs
                if job.method == method
                for client in job.summary().get("per_client", {}).values()
                if client["role"] == role and client["accuracy"] is not None
            ]
            if told:
                axis.boxplot(
                    [told], positions=[place], widths=0.6, showfliers=False, medianprops=BLACK
                )
                spread = np.linspace(-0.2, 0.2, len(told))
                axis.plot(place + spread, told, ".", color=f"C{place}", alpha=0.5)
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    return figure


def sub_populations(jobs: Sequence[Job]) -> "Figure":
    """F1 of each sub-population (columns) under each method (rows), the mean over seeds."""
    from matplotlib.figure import Figure

    told = {
        method: scores
        for method, group in groupby(jobs, key=lambda job: job.method)
        if (scores := [s for job in group if (s := f1_of(job))])
    }
    kinds = sorted({kind for scores in told.values() for s in scores for kind in s})
    values = np.array(
        [
            [np.mean([s.get(kind, np.nan) for s in scores]) for kind in kinds]
            for scores in told.values()
        ]
    )
    figure = Figure(figsize=(10, 1.2 + 0.4 * len(told)), layout="constrained")
    axis = figure.subplots()
    axis.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axis.set_yticks(range(len(told)), list(told))
    axis.set_xticks(range(len(kinds)), map(str, kinds))
    axis.set_xlabel("sub-population")
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value > 0.6 else "black"
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    return figure


def f1_of(job: Job) -> dict[int, float]:
    """F1 by sub-population at the run's best round; empty where none is told."""
    told = job.summary().get("train", {})
    return {int(k): f1 for key, f1 in told.items() if (k := key.removeprefix("f1_")).isdigit()}


def _axes(jobs: Sequence[Job]) -> tuple["Figure", dict[str, Any]]:
    """A panel for each role that there is."""
    from matplotlib.figure import Figure

    roles = [role for role in ROLES if role == "train" or novel_clients(jobs)]
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(roles), sharey=True, squeeze=False)[0]
    for axis, role in zip(panels, roles, strict=True):
        axis.set_title(ROLES[role])
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy (or F1), %")
    return figure, dict(zip(roles, panels, strict=True))


def _svg(figure: "Figure") -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _settings(jobs: Sequence[Job]) -> list[str]:
    """What differs from the defaults in all runs, and the versions of the libraries."""
    known = defaults()
    rows = [
        [key, str(value)]
        for key, value in sorted(jobs[0].config.items())
        if key not in OF_THE_RUN
        and value != known.get(key)
        and all(job.config.get(key) == value for job in jobs)
    ]
    parts = [_table(["setting", "value"], rows, "what differs from the defaults")]
    written = jobs[0].folder / "config.toml"
    if written.is_file():
        versions = tomllib.loads(written.read_text("utf-8")).get("versions", {})
        told = ", ".join(f"{name} {number}" for name, number in versions.items())
        parts.append(f"<p>{escape(told)}</p>")
    return parts
