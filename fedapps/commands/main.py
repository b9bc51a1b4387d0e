"""The `fedapps` command: registers the commands, one file each."""

from collections.abc import Callable

import typer

from fedapps.commands.data import data, partition
from fedapps.commands.deploy import deploy
from fedapps.commands.list import list_
from fedapps.commands.personalize import personalize
from fedapps.commands.plot import plot
from fedapps.commands.report import report
from fedapps.commands.run import run
from fedapps.commands.serve import serve
from fedapps.commands.settings import settings
from fedapps.commands.show import show
from fedapps.commands.table import table
from fedapps.commands.tune import tune

COMMANDS: tuple[Callable[..., None], ...] = (
    run, table, plot, report, tune, settings, data, show, personalize, serve, deploy,
)  # fmt: skip

cli = typer.Typer(
    help="Personalized federated learning on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    cli.command()(command)
cli.command("list")(list_)
cli.add_typer(partition, name="partition")


def main() -> None:
    """Entry point."""
    cli()
