"""`fedapps status`: how far runs and a deployment are."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fedapps.console import make_console, refusals, say
from fedapps.service import DEPLOYMENT


def status(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, of several runs, or of a deployment.")
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until nothing runs.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks of --watch.")] = 5.0,
) -> None:
    """Show how far runs are: round, clients, late and dropped replies, scores, time, ε spent.

    Of a deployment also its processes, nodes and runs."""
    console = make_console()
    shown: list[str] = []
    while True:
        with refusals(RuntimeError):
            if not 0 < every < float("inf"):
                raise ValueError(f"--every is {every}; it must be more than 0 seconds")
            lines, goes_on = look(folder)
        # A log gets what is new, a terminal a fresh page.
        if console.is_terminal and watch:
            console.clear()
        if lines != shown or console.is_terminal:
            for line in lines:
                say(console, line)
        shown = lines
        if not (watch and goes_on):
            return
        time.sleep(every)


def look(folder: Path) -> tuple[list[str], bool]:
    """What a person reads, and whether something goes on. Raises ValueError for a folder without
    runs, RuntimeError if a SuperLink does not answer."""
    if (folder / DEPLOYMENT).is_file():
        from fedapps.service.deploy import Deployment
        from fedapps.service.deployment_status import deployment_lines

        return deployment_lines(Deployment.read(folder))
    from fedapps.results.status import status_lines

    return status_lines(folder)
