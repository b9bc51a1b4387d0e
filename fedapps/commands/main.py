"""The `fedapps` command: registers the commands, one file each."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from fedapps.commands.data import data, partition
from fedapps.commands.deploy import deploy
from fedapps.commands.list import list_
from fedapps.commands.personalize import personalize
from fedapps.commands.plot import plot
from fedapps.commands.push import push
from fedapps.commands.report import report
from fedapps.commands.reproduce import reproduce
from fedapps.commands.run import run
from fedapps.commands.serve import serve
from fedapps.commands.settings import settings
from fedapps.commands.show import show
from fedapps.commands.status import status
from fedapps.commands.table import table
from fedapps.commands.tune import tune
from fedapps.console import StoppableGroup

COMMANDS: tuple[Callable[..., None], ...] = (
    run, reproduce, status, table, plot, report, tune, settings, data, show, personalize, serve,
    deploy, push,
)  # fmt: skip

cli = typer.Typer(cls=StoppableGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(
            f"fedapps {version('fedapps')}, flwr {version('flwr')}, torch {version('torch')}"
        )
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
) -> None:
    """Personalized federated learning on Flower."""


for command in COMMANDS:
    cli.command()(command)
cli.command("list")(list_)
cli.add_typer(partition, name="partition")


def main() -> None:
    """Entry point of a script that an older version has installed."""
    cli()
