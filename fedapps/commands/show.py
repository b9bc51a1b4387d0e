"""`fedapps show`: what a finished run is."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from fedapps.console import Allowed, make_console, refusals, say

RunFolder = Annotated[
    Path,
    typer.Argument(
        help="A finished run's folder, <method>-seed<seed>.", exists=True, file_okay=False
    ),
]

WhichRound = Annotated[
    str,
    typer.Option("--round", help="Its model: best, on training clients' validation; or last."),
]


def show(
    run: RunFolder,
    card: Annotated[
        bool, typer.Option("--card", help="Print a model card for the Hugging Face hub.")
    ] = False,
    allow: Allowed = None,
) -> None:
    """Show what a finished run is, and what a later client would get from it."""
    from fedapps.service.finished_run import FinishedRun
    from fedapps.service.model_card import facts, model_card

    with refusals():
        loaded = FinishedRun(run)
        rows = facts(loaded)
    if card:
        typer.echo(model_card(loaded))
        return
    console = make_console()
    rows["serve it"] = (
        f"fedapps personalize {quote(str(run))} DATA" if loaded.novel else "fedapps serve"
    )
    for name, value in rows.items():
        say(console, f"{name + ':':21}{value}")
