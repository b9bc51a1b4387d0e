"""``fedapps plot``: a figure of a folder of runs, or of one run's saved model."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedapps.console import Allowed, make_console, refusals, say
from fedapps.results import ENDINGS, check_ending

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

OF_RUNS = ("curves", "time", "clients", "decisions")
OF_A_MODEL = ("confusion", "embeddings", "rates", "traces")
KINDS = (*OF_RUNS, "swept", "gain", *OF_A_MODEL)
STEPS = 50
# The figures that read an option.
READ_BY = {
    "--by": ("swept",),
    "--run": OF_A_MODEL,
    "--client": ("traces",),
    "--steps": ("traces",),
    "--attribute": ("embeddings",),
}


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
    steps: Annotated[
        int | None, typer.Option(help=f"traces: adaptation steps; default: {STEPS}.")
    ] = None,
    attribute: Annotated[
        str, typer.Option(help="embeddings: colour clients by it, e.g. coarse.")
    ] = "",
    allow: Allowed = None,
) -> None:
    """Draw learning curves by round or simulated time, accuracy against a setting, clients,
    decisions without labels, confusion, embeddings, rates, traces; gain: of novel clients, by
    subfolder."""
    console = make_console()
    with refusals():
        if kind not in KINDS:
            raise ValueError(f"unknown figure {kind!r}; known: {', '.join(KINDS)}")
        check_ending(output)
        values = {
            "--by": by, "--run": run, "--client": client, "--steps": steps,
            "--attribute": attribute,
        }  # fmt: skip
        check_read(kind, values)

        from fedapps.results import plot as figures
        from fedapps.results.gains import scenarios
        from fedapps.results.runs import failures, read_runs

        if kind == "gain":
            _, problems = scenarios(folder)
            for problem in problems:
                say(console, problem)
            figures.save(figures.gain(folder), output)
            say(console, output)
            return
        runs, problems = read_runs(folder)
        for problem in [*problems, *failures(runs)]:
            say(console, problem)
        runs = runs[runs.error == ""]
        if kind in OF_RUNS:
            figure = figures.FIGURES[kind](runs)
        elif kind == "swept":
            if not by:
                raise ValueError("name the setting: --by partition.alpha")
            figure = figures.swept(runs, by)
        else:
            number = STEPS if steps is None else steps
            figure = _of_model(kind, _single(runs, run), client, number, attribute)
        figures.save(figure, output)
    say(console, output)


def check_read(kind: str, values: Mapping[str, str | int | None]) -> None:
    """Raise ValueError for the value of an option that the figure does not read; None and "" are
    not given."""
    for option, value in values.items():
        kinds = READ_BY[option]
        if value in (None, "") or kind in kinds:
            continue
        advice = "remove it"
        if option == "--run":
            advice = "remove it, or name the run's folder to draw that run alone"
        raise ValueError(
            f"{option} is {value!r}, but {kind} does not read it: it is for {', '.join(kinds)}; "
            f"{advice}"
        )


def _single(runs: "DataFrame", name: str) -> Path:
    """The folder of the run with this name; of the only run without a name."""
    folders = {folder.name: folder for folder in runs.folder}
    names = ", ".join(folders)
    if name and name not in folders:
        raise ValueError(f"no run {name!r}; there are {names}")
    if not name and len(folders) > 1:
        raise ValueError(f"name one run: --run {next(iter(folders))}; there are {names}")
    return folders[name or names]


def _of_model(kind: str, folder: Path, client: int | None, steps: int, attribute: str) -> "Figure":
    from fedapps.saved import opening
    from fedapps.service import figures

    with opening(folder):
        if kind == "confusion":
            return figures.confusion(folder)
        if kind == "embeddings":
            return figures.embeddings(folder, attribute)
        if kind == "rates":
            return figures.rates(folder)
        traces = figures.traces(folder, client, steps)
    for line in figures.trace_lines(traces):
        typer.echo(line)
    return figures.draw_traces(traces)
