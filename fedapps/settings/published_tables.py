"""The papers' tables and figures as data: the files in ``experiments/published/<paper>/``.

    paper = "FedTTA"              # and item, title, measure, spread, seeds, reported, damaged
    [rows]                        # the methods of the table, each with its name in the paper
    fedavg = "FedAvg"
    [settings]                    # what the paper states, in the form of an experiment's settings
    [released]                    # what the authors' program has beyond the text
    [grids]                       # what the paper searched without printing its choice
    [clients-per-round]           # clients that train in a round, by method
    [[columns]]
    at = { dataset = "mnist" }    # the settings that tell the column from the others
    # by score and row: value and spread; [] is not legible
    novel-accuracy = { fedavg = [94.69, 0.08] }

A column may have `settings`, `released` and `facts`, such as the number of samples, of its own. An
experiment names its tables: ``published = "fedtta/table1"``."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "published"
# What a column has beside its scores. `group` holds values of a run that serves several columns.
BESIDE_SCORES = ("name", "at", "settings", "released", "facts", "derived", "group")
# The keys that scores had in earlier releases.
FORMER_SCORES = {
    "train": "train-accuracy",
    "novel": "novel-accuracy",
    "test": "train-test-accuracy",
    "f1": "train-f1",
    "f1-users": "train-f1-users",
    "test-rmse": "train-test-rmse",
}


def score_key(name: str) -> str:
    """The key of the score that a file of any release calls `name`."""
    return FORMER_SCORES.get(name, name)


def with_score_keys(column: Mapping[str, Any]) -> dict[str, Any]:
    """A column under the present keys of its scores."""
    return {score_key(name): values for name, values in column.items()}


def published_tables(root: Path) -> dict[str, Path]:
    """The tables in the folder of the experiments, ``<paper>/<table>`` → file."""
    folder = root / FOLDER
    files = sorted(folder.glob("*/*.toml"))
    return {str(file.relative_to(folder).with_suffix("")): file for file in files}


def read_table(name: str, root: Path) -> dict[str, Any]:
    """The content of a table's file. Raises ValueError for an unknown name."""
    known = published_tables(root)
    if name not in known:
        raise ValueError(f"published names the table {name!r}; known: {', '.join(known) or 'none'}")
    return tomllib.loads(known[name].read_text("utf-8"))


def cells(column: Mapping[str, Any]) -> set[str]:
    """The rows that a column has under any score."""
    rows: set[str] = set()
    for score, values in column.items():
        if score not in BESIDE_SCORES:
            rows |= values.keys()
    return rows


def published_columns(
    names: str | Sequence[str], labels: Iterable[str], root: Path
) -> list[dict[str, Any]]:
    """The tables' values for an experiment's labels, in the form of its own [published] tables."""
    labels = list(labels)
    columns: list[dict[str, Any]] = []
    for name in [names] if isinstance(names, str) else names:
        for column in read_table(name, root)["columns"]:
            at = column["at"]
            values: dict[str, Any] = {"at": at}
            for score, cells in column.items():
                if score not in BESIDE_SCORES:
                    values[score] = _by_label(cells, labels, at)
            columns.append(values)
    return columns


def _by_label(
    cells: Mapping[str, Sequence[float]], labels: Iterable[str], at: Mapping[str, Any]
) -> dict[str, float]:
    """The values by label, without the words that the column's `at` has."""
    values: dict[str, float] = {}
    for label in labels:
        row = row_of(label, cells)
        if row is not None and cells[row]:
            method, *words = label.split()
            words = [word for word in words if word.partition("=")[0] not in at]
            values[" ".join([method, *words])] = cells[row][0]
    return values


def row_of(label: str, rows: Iterable[str]) -> str | None:
    """The row that an experiment's label belongs to: that of its method, which may name some of the
    label's settings. The row that names most of them wins. None if there is no such row."""
    method, *words = label.split()
    best: str | None = None
    for row in rows:
        row_method, *row_words = row.split()
        belongs = row_method == method and set(row_words) <= set(words)
        if belongs and (best is None or len(row_words) >= len(best.split())):
            best = row
    return best
