"""`fedapps report`: an HTML page over all runs of a folder."""

from pathlib import Path
from typing import Annotated

import typer

from fedapps.console import make_console, refusals, say


def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `fedapps run` wrote to.")],
) -> None:
    """Write report.html over all runs of a folder: table, curves, clients, settings."""
    from fedapps.results.report import write_report
    from fedapps.results.runs import read_runs

    with refusals():
        runs, problems = read_runs(folder)
        try:
            page = write_report(runs, folder, problems)
        except OSError as error:
            raise ValueError(
                f"no report: {error}; copy {folder} to a folder that you can write, and name it"
            ) from error
    console = make_console()
    for line in (*problems, page):
        say(console, line)
