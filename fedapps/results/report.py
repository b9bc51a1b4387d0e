"""The HTML report of a folder of runs: table, curves, clients, costs, settings.

One file that needs no other and no network: `report.html` here is its page, into which the tables
and the numbers are put; a script in it draws them."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedapps.engines.jobs import Job
from fedapps.files import write_text
from fedapps.results.across import SHOTS, several, side_by_side
from fedapps.results.comparison import compare
from fedapps.results.plot import ROLES
from fedapps.results.runs import rounds_of, versions_of
from fedapps.results.table import results
from fedapps.settings.config import defaults

NAME = "report.html"
OF_THE_RUN = {"method", "seed", "output-dir", "versions"}  # settings that the page shows elsewhere
LIMIT = 2_000_000  # bytes of the page
DIGITS = 5  # of an accuracy in [0, 1]


def write_report(jobs: Sequence[Job], folder: Path, problems: Sequence[str] = ()) -> Path:
    """Write the report of the runs to `folder`, `problems` told in it; returns the file.

    What does not fit into `LIMIT` bytes is left out, and told: rounds between others, then clients
    of later seeds, then all clients."""
    shown = results(jobs)
    told = [*(f"{job.name} failed: {job.error}" for job in jobs if job.error), *problems]
    first = min((job.seed for job in jobs), default=0)
    for points, seeds, left_out in (
        (1000, None, ""),
        (100, None, "only some of the rounds are drawn"),
        (100, {first}, f"only some of the rounds and clients of seed {first} are drawn"),
        (100, set[int](), "only some of the rounds and no single clients are drawn"),
    ):
        runs = [run_data(job, points, seeds is None or job.seed in seeds) for job in jobs]
        notes = [*told, *([f"so that the page stays small, {left_out}"] if left_out else [])]
        filled = {
            "title": escape(shown.title),
            "problems": "".join(f'<p class="error">{escape(note)}</p>' for note in notes),
            "table": _table(shown.columns, shown.rows, shown.caption),
            "shots": _shots(jobs),
            "settings": "".join(_settings(jobs)),
            "data": _json({"roles": ROLES, "runs": runs}),
        }
        page = (files("fedapps.results") / NAME).read_text("utf-8")
        head, *rest = page.split("{{")  # in one pass: what is filled in is not looked at again
        page = head + "".join(filled[name] + text for name, text in _holes(rest))
        if len(page.encode()) <= LIMIT:
            break
    write_text(folder / NAME, page)
    return folder / NAME


def run_data(job: Job, points: int, with_clients: bool) -> dict[str, Any]:
    """What the page draws of a run: of at most `points` evaluations [round, training, novel]
    scores in [0, 1]; of clients [id, role, accuracy, samples, accuracy at the last round]."""
    summary = {} if job.error else job.summary()
    rounds = rounds_of(job)
    evaluations = [
        [report["round"], *(_score(report["evaluation"], role) for role in ROLES)]
        for report in rounds
        if isinstance(report.get("evaluation"), dict)
    ]
    dropped: dict[str, int] = {}
    phases: dict[str, float] = {}
    for report in rounds:
        for cause, count in report.get("dropped", {}).items():
            dropped[cause] = dropped.get(cause, 0) + count
        for phase, seconds in report.get("phases", {}).items():
            phases[phase] = phases.get(phase, 0.0) + seconds / len(rounds)
    last = summary.get("last", {}).get("per_client", {})
    clients = summary.get("per_client", {}) if with_clients else {}
    return {
        "method": job.method,
        "seed": job.seed,
        "rounds": summary.get("rounds", 0),
        "seconds": summary.get("seconds"),  # private: none
        "megabytes": summary.get("megabytes_per_client_round", {"down": 0.0, "up": 0.0}),
        "phases": phases,
        "dropped": dropped,
        "evaluations": evaluations[:: -(-len(evaluations) // points) or 1],
        "f1": f1_of(summary),
        "clients": [
            [
                name,
                one["role"],
                _short(one["accuracy"]),
                one["examples"],
                _short(last.get(name, {}).get("accuracy")),
            ]
            for name, one in clients.items()
        ],
    }


def f1_of(summary: dict[str, Any]) -> dict[str, float]:
    """F1 by sub-population at the run's reported round; empty where none is told."""
    told = summary.get("train") or {}
    return {k: f1 for key, f1 in told.items() if (k := key.removeprefix("f1_")).isdigit()}


def _score(numbers: dict[str, Any], role: str) -> float | None:
    return _short(numbers.get(f"{role}-accuracy", numbers.get(f"{role}-f1")))


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _holes(parts: Sequence[str]) -> list[tuple[str, str]]:
    """``"name}}text"`` as (name, text)."""
    return [(name, text) for name, _, text in (part.partition("}}") for part in parts)]


def _json(value: Any) -> str:
    """JSON that cannot end the script element that holds it; null for NaN, which JSON has not."""
    whole = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(whole, separators=(",", ":")).replace("<", "\\u003c")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _shots(jobs: Sequence[Job]) -> str:
    """Novel clients by the labels that they show, side by side; "" of runs that are alike in it."""
    if not several(jobs, SHOTS):
        return ""
    shown = side_by_side(compare(jobs, by=["method", SHOTS]), SHOTS, ["novel"])
    return _table(shown.columns, shown.rows, shown.caption)


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
    told = ", ".join(f"{name} {number}" for name, number in versions_of(jobs[0]).items())
    table = _table(["setting", "value"], rows, "what differs from the defaults")
    return [
        f'<div class="settings">{table}</div>',
        f'<p class="dim">{escape(told)}</p>' * bool(told),
    ]
