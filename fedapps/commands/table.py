"""``fedapps table``: the runs of a folder as a table for a terminal, a page or a paper."""

from pathlib import Path
from typing import Annotated

import typer

from fedapps.console import make_console, say, say_error
from fedapps.results.across import SHOTS, several, side_by_side
from fedapps.results.comparison import as_csv, compare, shown, swept
from fedapps.results.formats import as_latex, as_markdown
from fedapps.results.published import Published
from fedapps.results.runs import read_runs
from fedapps.results.table import rich_table
from fedapps.settings.experiments import read_experiment

FORMATS = ("rich", "markdown", "csv", "latex")


def table(
    folder: Annotated[Path, typer.Argument(help="A folder that `fedapps run` wrote to.")],
    format_: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = (
        "rich"
    ),
    round_: Annotated[
        str, typer.Option("--round", help="best: on training clients' validation; or last.")
    ] = "best",
    by: Annotated[str, typer.Option(help='What makes a row, e.g. "method,partition.alpha".')] = "",
    across: Annotated[
        str, typer.Option(help="Setting whose values stand side by side; default: novel-shots.")
    ] = "",
    against: Annotated[
        str, typer.Option(help="The row that others are compared with; default: the first.")
    ] = "",
    experiment: Annotated[
        str, typer.Option(help="Experiment with published values; default: the folder's own.")
    ] = "",
) -> None:
    """Compare the runs of a folder: mean over seeds, published values, paired tests, fairness.

    Runs that differ in novel-shots stand side by side, unless --by names it."""
    console, warnings = make_console(), make_console(stderr=True)
    try:
        if format_ not in FORMATS:
            raise ValueError(f"unknown format {format_!r}; known: {', '.join(FORMATS)}")
        runs, problems = read_runs(folder)
        keys = [word.strip() for word in by.split(",") if word.strip()]
        if not across and SHOTS not in keys and several(runs, SHOTS):
            across = SHOTS
        if across:
            keys = list(dict.fromkeys([*(keys or ["method", *swept(runs)]), across]))
        found = compare(
            runs,
            by=keys,
            round_=round_,
            against=against,
            published=published_for(folder, experiment),
        )
        problems += [f"{job.name} failed: {job.error}" for job in runs if job.error]
    except (ValueError, OSError) as error:
        say_error(warnings, error)
        raise typer.Exit(2) from error
    for problem in problems:
        say(warnings, problem)
    if format_ == "csv":  # a line for each number, whatever stands side by side elsewhere
        typer.echo(as_csv(found), nl=False)
        return
    results = side_by_side(found, across) if across else shown(found)
    if format_ == "rich":
        console.print(rich_table(results))
    else:
        write = as_markdown if format_ == "markdown" else as_latex
        typer.echo(write(results), nl=False)


def published_for(folder: Path, experiment: str = "") -> Published | None:
    """The published values of an experiment, or of the one that the folder's runs came from."""
    own = folder / "experiment.toml"
    if not experiment and not own.is_file():
        return None
    asked = read_experiment(experiment or str(own))
    return Published.read(asked.settings, asked.published) if asked.published else None
