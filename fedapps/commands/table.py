"""``fedapps table``: the runs of a folder as a table for a terminal, a page or a paper."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedapps.console import make_console, say, say_error

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedapps.results.formats import TextTable
    from fedapps.results.published import Published

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
    scores: Annotated[
        str,
        typer.Option(
            help="gain,harmed,worst-decile,… of novel clients, by subfolder if these hold the runs."
        ),
    ] = "",
    experiment: Annotated[
        str, typer.Option(help="Experiment with published values; default: the folder's own.")
    ] = "",
) -> None:
    """Compare the runs of a folder: mean over seeds, published values, paired tests, fairness.

    Runs that differ in novel-shots stand side by side, unless --by names it."""
    try:
        if format_ not in FORMATS:
            raise ValueError(f"unknown format {format_!r}; known: {', '.join(FORMATS)}")

        from fedapps.results.comparison import compare
        from fedapps.results.runs import failures, read_runs

        asked = listed(scores)
        if asked:
            _check_alone({"by": by, "across": across, "experiment": experiment})
            show_scores(folder, asked, round_, against, format_)
            return
        runs, problems = read_runs(folder)
        keys, across = lines_of(runs, listed(by), across)
        if format_ == "latex":
            from fedapps.results.formats import displayed

            runs = runs.assign(method=runs.method.map(displayed))
            against = displayed(against)
        published = published_for(folder, experiment)
        comparison = compare(runs, by=keys, round_=round_, against=against, published=published)
    except (ValueError, OSError) as error:
        say_error(make_console(stderr=True), error)
        raise typer.Exit(2) from error
    from fedapps.results.comparison import as_csv, as_table, side_by_side

    warn([*problems, *failures(runs)])
    if format_ == "csv":  # a line for each number, also with --across
        typer.echo(as_csv(comparison), nl=False)
        return
    shown = side_by_side(comparison, across) if across else as_table(comparison)
    show(shown, format_)


def _check_alone(options: Mapping[str, str]) -> None:
    """Raise ValueError for one of these options that is given beside --scores."""
    for option, value in options.items():
        if value:
            raise ValueError(f"--{option} does not go with --scores; remove one")


def warn(problems: Iterable[str]) -> None:
    """Print sentences to the standard error."""
    console = make_console(stderr=True)
    for problem in problems:
        say(console, problem)


def listed(text: str) -> list[str]:
    """The words of a text with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def lines_of(runs: "DataFrame", by: list[str], across: str) -> tuple[list[str], str]:
    """What makes a line of the comparison, and the setting whose values stand side by side."""
    from fedapps.results.comparison import SHOTS, check_setting, several, swept

    if across:
        check_setting(runs[runs.error == ""], across, "--across")
    if not across and SHOTS not in by and several(runs, SHOTS):
        across = SHOTS
    return ([*(by or ["method", *swept(runs)]), across] if across else by), across


def show_scores(folder: Path, asked: list[str], round_: str, against: str, format_: str) -> None:
    """Print the `asked` scores of novel clients; with runs in subfolders a table for each score."""
    from fedapps.results.gains import gains_table, scenarios, scenarios_table
    from fedapps.results.runs import failures, read_runs

    if any(folder.glob("*/summary.json")):
        runs, problems = read_runs(folder)
        warn([*problems, *failures(runs)])
        show(gains_table(runs, asked, round_, against), format_)
        return
    found, problems = scenarios(folder)
    warn(problems)
    for score in asked:
        show(scenarios_table(found, score, round_, against), format_)


def show(shown: "TextTable", format_: str) -> None:
    """Print the table. Raises ValueError for a format that has no such tables."""
    from fedapps.results.formats import as_latex, as_markdown, as_rich

    if format_ == "csv":
        raise ValueError("--scores has no csv; use rich, markdown or latex")
    if format_ == "rich":
        make_console().print(as_rich(shown))
    else:
        typer.echo((as_markdown if format_ == "markdown" else as_latex)(shown), nl=False)


def published_for(folder: Path, experiment: str = "") -> "Published | None":
    """The published values of an experiment, by default of the one that the runs came from."""
    copy = folder / "experiment.toml"
    if not experiment and not copy.is_file():
        return None

    from fedapps.results.published import Published
    from fedapps.settings.experiments import read_experiment

    content = read_experiment(experiment or str(copy))
    return Published.read(content.settings, content.published) if content.published else None
