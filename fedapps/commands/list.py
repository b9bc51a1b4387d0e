"""``fedapps list``: what can be named in a configuration. Nothing of torch or Flower is loaded."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from fedapps.commands import completion
from fedapps.common.tasks import ALL_TASKS
from fedapps.console import make_console, refusals
from fedapps.methods import METHODS, families

Rows = list[dict[str, Any]]
SHORTER = {", ".join(ALL_TASKS): "all"}  # texts of the table
HEADINGS = {"line": "what it is", "novel clients": "novel clients get"}
WIDE = {"paper", "privacy", "own client", "options"}  # columns of `--wide`


def _methods() -> Rows:
    return [
        {
            "name": name,
            "line": method.summary,
            "novel clients": method.novel or "no",
            "tasks": ", ".join(method.served_tasks),
            "family": ", ".join(method.family),
            "paper": method.paper,
            "privacy": ", ".join(method.dp) or "no",
            "own client": method.own_client,
        }
        for name, method in METHODS.items()
    ]


def _datasets() -> Rows:
    from partitions.datasets.loading import DATASETS, info

    entries = [(name, info(name)) for name in DATASETS]
    return [
        {"name": n, "shape": str(i.shape), "classes": i.num_classes, "line": i.summary}
        for n, i in entries
    ]


def _partitions() -> Rows:
    from partitions.rules.registry import PARTITIONS

    return [
        {"name": name, "line": rule.summary, "options": ", ".join(rule.options)}
        for name, rule in PARTITIONS.items()
    ]


def _models() -> Rows:
    from clients.models import MODELS

    return [{"name": name, "line": model.summary} for name, model in MODELS.items()]


def _experiments() -> Rows:
    from fedapps.settings.experiments import experiments

    return [
        {"name": name, "line": file.read_text("utf-8").partition("\n")[0].lstrip("# ")}
        for name, file in experiments().items()
    ]


def _tables() -> Rows:
    from fedapps.settings.experiments import experiments_root
    from fedapps.settings.published_tables import published_tables, read_table

    rows = []
    for name in published_tables(experiments_root()):
        content = read_table(name, experiments_root())
        line = f"{content['paper']}, {content['item']}: {content['title']}"
        rows.append({"name": name, "line": line})
    return rows


LISTS: dict[str, Callable[[], Rows]] = {
    "methods": _methods,
    "datasets": _datasets,
    "partitions": _partitions,
    "models": _models,
    "experiments": _experiments,
    "tables": _tables,
}


def _rows(what: str, family: str) -> Rows:
    """The rows of a list, those of one family unless `family` is empty. Raises ValueError for
    unknown names."""
    if what not in LISTS:
        raise ValueError(f"unknown list {what!r}; known: {', '.join(LISTS)}")
    rows = LISTS[what]()
    if not family:
        return rows
    if what != "methods":
        raise ValueError(f"--family is for methods: {what} have no families")
    if family not in families():
        raise ValueError(f"unknown family {family!r}; known: {', '.join(families())}")
    return [row for row in rows if family in METHODS[row["name"]].family]


def list_(
    what: Annotated[
        str, typer.Argument(help=", ".join(LISTS), autocompletion=completion.one_of(LISTS))
    ],
    wide: Annotated[bool, typer.Option("--wide", help="Show all columns.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    family: Annotated[
        str,
        typer.Option(
            help=f"List the methods of a family: {', '.join(families())}.",
            autocompletion=completion.one_of(families()),
        ),
    ] = "",
) -> None:
    """List what can be named in a configuration."""
    console = make_console()
    with refusals():
        rows = _rows(what, family)
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    shown = [key for key in rows[0] if wide or key not in WIDE]
    table = Table(box=SIMPLE, pad_edge=False)
    for key in shown:
        table.add_column(HEADINGS.get(key, key), no_wrap=key == "name")
    for row in rows:
        cells = [SHORTER.get(row[key], row[key]) for key in shown]
        texts = [("no", "yes")[c] if isinstance(c, bool) else str(c) for c in cells]
        table.add_row(*texts)
    console.print(table)
    if len(shown) < len(rows[0]):
        console.print("--wide shows all columns, --json prints them for programs")
