"""``fedapps plot``: a figure of a folder of runs, or of one run's saved model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedapps.console import Allowed, make_console, say, say_error
from fedapps.engines.jobs import Job
from fedapps.files import opening
from fedapps.results.plot import ENDINGS, FIGURES, save, swept
from fedapps.results.runs import read_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_A_MODEL = ("confusion", "embeddings", "traces")
KINDS = (*FIGURES, "swept", *OF_A_MODEL)


def plot(
    folder: Annotated[Path, typer.Argument(help="A folder that `fedapps run` wrote to.")],
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    output: Annotated[Path, typer.Option(help=f"The figure: {', '.join(ENDINGS)}.")] = Path(
        "figure.pdf"
    ),
    by: Annotated[str, typer.Option(help="swept: the setting, e.g. partition.alpha.")] = "",
    run: Annotated[
        str, typer.Option(help=f"{', '.join(OF_A_MODEL)}: which run, if there are several.")
    ] = "",
    client: Annotated[
        int | None, typer.Option(help="traces: a novel client; default: the mean of all.")
    ] = None,
    steps: Annotated[int, typer.Option(help="traces: adaptation steps.")] = 50,
    attribute: Annotated[
        str, typer.Option(help="embeddings: colour clients by it, e.g. coarse.")
    ] = "",
    allow: Allowed = None,
) -> None:
    """Draw learning curves, accuracy against a setting, clients, confusion, embeddings, traces."""
    console = make_console()
    try:
        if kind not in KINDS:
            raise ValueError(f"unknown figure {kind!r}; known: {', '.join(KINDS)}")
        if output.suffix.lower() not in ENDINGS:
            raise ValueError(f"{output} must end in one of {', '.join(ENDINGS)}")
        runs, problems = read_runs(folder)
        for problem in problems:
            say(console, problem)
        whole = [job for job in runs if not job.error]
        if kind in FIGURES:
            figure = FIGURES[kind](whole)
        elif kind == "swept":
            if not by:
                raise ValueError("name the setting: --by partition.alpha")
            figure = swept(whole, by)
        else:
            figure = _of_a_model(kind, _single(whole, run).folder, client, steps, attribute)
        save(figure, output)
    except (ValueError, OSError) as error:
        say_error(console, error)
        raise typer.Exit(2) from error
    say(console, output)


def _single(jobs: Sequence[Job], name: str) -> Job:
    """The run of this folder's name; the only one without a name."""
    names = [job.folder.name for job in jobs]
    if name and name not in names:
        raise ValueError(f"no run {name!r}; there are {', '.join(names)}")
    if not name and len(jobs) > 1:
        raise ValueError(f"name one run: --run {names[0]}; there are {', '.join(names)}")
    return jobs[names.index(name) if name else 0]


def _of_a_model(
    kind: str, folder: Path, client: int | None, steps: int, attribute: str
) -> "Figure":
    from fedapps.service import models, traces

    with opening(folder):
        if kind == "confusion":
            return models.confusion(folder)
        if kind == "embeddings":
            return models.embeddings(folder, attribute)
        found = traces.traces(folder, client, steps)
    for line in traces.told(found):
        typer.echo(line)
    return traces.draw(found)
