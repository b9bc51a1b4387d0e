"""The `fedapps` command: registers the commands, each of which has a file."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.table import Table

from fedapps.commands.data import data, partition
from fedapps.commands.deploy import deploy
from fedapps.commands.personalize import personalize
from fedapps.commands.plot import plot
from fedapps.commands.report import report
from fedapps.commands.run import run
from fedapps.commands.serve import serve
from fedapps.commands.show import show
from fedapps.commands.table import table
from fedapps.commands.tune import tune
from fedapps.console import make_console, say_error

COMMANDS: tuple[Callable[..., None], ...] = (
    run, table, plot, report, tune, data, show, personalize, serve, deploy,
)  # fmt: skip

cli = typer.Typer(
    help="Personalized federated learning on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    cli.command()(command)
cli.add_typer(partition, name="partition")


def main() -> None:
    """Entry point."""
    cli()


@cli.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, datasets, partitions, models, experiments")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what can be named in a configuration."""
    console = make_console()
    if what not in LISTS:
        say_error(console, f"unknown list {what!r}; known: {', '.join(LISTS)}")
        raise typer.Exit(2)
    rows = LISTS[what]()
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    table = Table(*(rows[0] if rows else ["nothing yet"]))
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)


def _text(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _methods() -> list[dict[str, Any]]:
    from clients.base import Client
    from fedapps.methods import METHODS

    return [
        {
            "name": name,
            "paper": method.paper,
            "line": method.line,
            "novel clients": method.novel or "no",
            "privacy": ", ".join(method.dp) or "no",
            "own client": method.client is not Client,
        }
        for name, method in METHODS.items()
    ]


def _datasets() -> list[dict[str, Any]]:
    from partitions.datasets import DATASETS, info

    return [
        {
            "name": name,
            "shape": str(info(name).shape),
            "classes": info(name).num_classes,
            "line": info(name).line,
        }
        for name in DATASETS
    ]


def _partitions() -> list[dict[str, Any]]:
    from partitions.registry import PARTITIONS

    return [
        {"name": name, "line": entry.line, "options": ", ".join(entry.options)}
        for name, entry in PARTITIONS.items()
    ]


def _models() -> list[dict[str, Any]]:
    from clients.models import MODELS

    return [{"name": name, "line": model.line} for name, model in MODELS.items()]


def _experiments() -> list[dict[str, Any]]:
    from fedapps.settings.config import experiments

    return [
        {"name": name, "line": file.read_text("utf-8").partition("\n")[0].lstrip("# ")}
        for name, file in experiments().items()
    ]


LISTS = {
    "methods": _methods,
    "datasets": _datasets,
    "partitions": _partitions,
    "models": _models,
    "experiments": _experiments,
}
