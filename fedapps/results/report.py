"""The HTML report of a folder of runs: table, curves, clients, costs, settings.

One file that needs no other file and no network, from the template report.html. Jinja escapes
every name; the figures are those of `fedapps plot`."""

import tomllib
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapps.files import write_text
from fedapps.results import plot
from fedapps.results.comparison import SHOTS, compare, several, side_by_side
from fedapps.results.formats import TextTable
from fedapps.results.runs import ROLES, clients_of, read_rounds, rounds_of
from fedapps.results.table import results
from fedapps.settings.config import defaults

if TYPE_CHECKING:
    from pandas import DataFrame

NAME = "report.html"
ELSEWHERE = {"method", "seed", "output-dir", "versions"}  # settings that other parts show
LIMIT = 2_000_000  # bytes of the page


def write_report(runs: "DataFrame", folder: Path, problems: Sequence[str] = ()) -> Path:
    """Write the report of the runs, with the `problems`, to `folder`; returns the file.

    What does not fit into `LIMIT` bytes is left out with a note: rounds, then clients of later
    seeds, then all clients."""
    from jinja2 import Environment, StrictUndefined

    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        (files("fedapps.results") / NAME).read_text("utf-8")
    )
    failed = runs[runs.error != ""].itertuples()
    notes = [*(f"{run.name} failed: {run.error}" for run in failed), *problems]
    first = runs.seed.min()
    for points, with_clients, left_out in (
        (1000, runs, ""),
        (100, runs, "only some of the rounds are drawn"),
        (100, runs[runs.seed == first], f"only some rounds and clients of seed {first} are drawn"),
        (100, runs[:0], "only some of the rounds and no single clients are drawn"),
    ):
        small = [f"so that the page stays small, {left_out}"] * bool(left_out)
        page = template.render(content(runs, with_clients, points), problems=[*notes, *small])
        if len(page.encode()) <= LIMIT:
            break
    write_text(folder / NAME, page)
    return folder / NAME


def content(runs: "DataFrame", with_clients: "DataFrame", points: int) -> dict[str, Any]:
    """What the template shows: at most `points` rounds, and the clients of some of the runs."""
    clients = client_rows(with_clients)
    rounds = rounds_of(runs, points)
    dots = clients_of(with_clients).accuracy.notna().any()
    return {
        "results": results(runs),
        "shots": _shots(runs),
        "methods": list(zip(runs.method.unique(), plot.line_styles(), strict=False)),
        "curves": plot.as_svg(plot.curves(runs, points)) if len(rounds) else "",
        "rounds": [_by_round(rounds_of(runs, 100), role) for role in ROLES],
        "f1": f1_by_type(runs),
        "dots": plot.as_svg(plot.clients(with_clients)) if dots else "",
        "clients": clients,
        "client_ids": sorted(dict.fromkeys(row[0] for row in clients), key=_numbers_first),
        "costs": costs(runs),
        "settings": _settings(runs),
        "versions": _versions(runs.folder.iloc[0]),
        "colours": plot.COLOURS,
    }


def client_rows(runs: "DataFrame") -> list[list[str]]:
    """Client, method, seed, role, samples, accuracy at the reported and at the last round, rank."""
    best, last = clients_of(runs), clients_of(runs, "last")
    best = best.merge(last[["run", "client", "accuracy"]], "left", ["run", "client"])
    group = best.groupby(["run", "role"]).accuracy_x
    best = best.assign(rank=group.rank("min", ascending=False), count=group.transform("count"))
    return [
        [
            *(client.client, client.method, str(client.seed), client.role, str(client.examples)),
            _number(client.accuracy_x, 2),
            _number(client.accuracy_y, 2),
            "–" if client.rank != client.rank else f"{client.rank:.0f} of {client.count}",
        ]
        for client in best.itertuples(index=False)
    ]


def f1_by_type(runs: "DataFrame") -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """The sub-populations, and by method the mean F1 over seeds in each; None if unknown."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs.dropna(subset="summary").itertuples():
        for key, f1 in run.summary.train.items():
            if (name := key.removeprefix("f1_")).isdecimal() and f1 is not None:
                values.setdefault(run.method, {}).setdefault(name, []).append(f1)
    names = sorted({name for by_type in values.values() for name in by_type}, key=int)
    return names, [
        (method, [sum(f) / len(f) if (f := by_type.get(name)) else None for name in names])
        for method, by_type in values.items()
    ]


def costs(runs: "DataFrame") -> list[dict[str, Any]]:
    """By method: seconds of a round and of its phases, megabytes, dropped replies by cause."""
    rows = []
    for method, group in runs[runs.rounds > 0].groupby("method", sort=False):
        phases: dict[str, float] = {}
        dropped = Counter[str]()
        for run in group.itertuples():
            reports = read_rounds(run.folder)
            for report in reports:
                dropped.update(report.dropped)
                for phase, seconds in report.phases.items():
                    mean = seconds / len(reports) / len(group)
                    phases[phase] = phases.get(phase, 0.0) + mean
        rows.append(
            {
                "method": method,
                "seconds": (group.seconds / group.rounds).mean(),
                "phases": phases,
                "down": _number(group.down.mean(skipna=False), 3),
                "up": _number(group.up.mean(skipna=False), 3),
                "dropped": ", ".join(f"{cause} {count}" for cause, count in dropped.items()),
            }
        )
    return rows


def _by_round(rounds: "DataFrame", role: str) -> TextTable:
    """Mean and range over seeds, a row per round and a column per method."""
    scores = rounds.dropna(subset=role).groupby(["round", "method"], sort=False)[role]
    cells: dict[int, dict[str, str]] = {}
    for (round_, method), values in scores:
        spread = f" ({values.min():.2f} – {values.max():.2f})" if len(values) > 1 else ""
        cells.setdefault(round_, {})[method] = f"{values.mean():.2f}{spread}"
    methods = list(dict.fromkeys(method for row in cells.values() for method in row))
    rows = [[str(n), *(cells[n].get(method, "–") for method in methods)] for n in sorted(cells)]
    return TextTable("", ["round", *methods], rows, f"{ROLES[role]}, %; range over seeds")


def _shots(runs: "DataFrame") -> TextTable | None:
    """Novel clients by the labels that they show; None if all runs are alike in it."""
    if not several(runs, SHOTS):
        return None
    return side_by_side(compare(runs, by=["method", SHOTS]), SHOTS, ["novel"])


def _settings(runs: "DataFrame") -> TextTable:
    """What differs from the defaults in all runs."""
    known = defaults()
    rows = [
        [key, str(value)]
        for key, value in sorted(runs.config.iloc[0].items())
        if key not in ELSEWHERE
        and value != known.get(key)
        and all(config.get(key) == value for config in runs.config)
    ]
    return TextTable("", ["setting", "value"], rows, "what differs from the defaults")


def _versions(folder: Path) -> str:
    file = folder / "config.toml"
    config = tomllib.loads(file.read_text("utf-8")) if file.is_file() else {}
    return ", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items())


def _number(value: float, digits: int) -> str:
    return "–" if value != value else f"{value:.{digits}f}"


def _numbers_first(name: str) -> tuple[bool, int, str]:
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name
