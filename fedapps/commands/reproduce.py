"""`fedapps reproduce`: run a paper's table, and print our values beside the published ones."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedapps.commands import options
from fedapps.commands.run import carry_out, choose, make_report, say_failures
from fedapps.common.signals import exit_code
from fedapps.console import make_console, refusals, say
from fedapps.planning import (
    check_options,
    federation_line,
    keep_or_discard,
    plan,
    prepare,
    say_stopped,
)

if TYPE_CHECKING:
    from fedapps.engines.jobs import Job
    from fedapps.estimate import Measured
    from fedapps.reproduction import Part


def reproduce(
    table: Annotated[str, typer.Argument(help="A name of `fedapps list tables`.")],
    data: Annotated[
        str,
        typer.Option(
            help="fashion-mnist or mnist: the columns of this dataset; if the table has none, its "
            "structure with this dataset."
        ),
    ] = "",
    rounds: Annotated[int, typer.Option(help="Rounds of each run; default: the paper's.")] = 0,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "",
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: results/PAPER/TABLE.")
    ] = None,
    dry_run: options.DryRun = False,
    engine: options.Engine = "",
    jobs: options.Jobs = None,
) -> None:
    """Run all rows and columns of a paper's table, each with its own settings.

    The data are checked and the cost is printed first. Finished runs in the output folder are
    kept, and unfinished ones resume."""
    console = make_console()
    with refusals():
        check_options([], "", seeds, engine, jobs, 0.0, "")
        if rounds < 0:
            raise ValueError(f"--rounds is {rounds}; it must be at least 1")
        from fedapps.reproduction import check_facts, check_present, parts_of, requested

        folder = output or Path("results") / table
        parts = parts_of(table, data)
        check_present(parts)
        # All parts are checked before the first one trains.
        planned: list[tuple[Part, list[Job]]] = []
        for part in parts:
            for line in check_facts(part):
                say(console, line)
            work = plan(requested(part, rounds, seeds), folder / part.folder, None, False, False)
            keep_or_discard(work, folder / part.folder, fresh=False, yes=True)
            planned.append((part, work))
        measured: Measured = {}
        chosen: list[tuple[str, int]] = []
        for part, work in planned:
            used, parallel = choose(console, work, engine, jobs, measured, ray=False)
            chosen.append((used, parallel))
            say_cost(console, part, work, used, parallel, measured)
    if dry_run:
        return
    for (part, work), (used, parallel) in zip(planned, chosen, strict=True):
        place = folder / part.folder
        with refusals():
            prepare(console, work, place, part.experiment.source)
        try:
            carry_out(
                console, work, used, parallel=parallel, gpus_per_client=0.0, ray_address="",
                debug=False,
            )  # fmt: skip
        except KeyboardInterrupt as error:
            say_failures(console, work)
            say_stopped(console, work, place)
            say(console, "the same command continues the table")
            raise typer.Exit(exit_code(error)) from None
        say_failures(console, work)
        make_report(console, work, place)
    changes: dict[str, Any] = {}
    command = f"fedapps reproduce {table}"
    for name, value in (("data", data), ("rounds", rounds), ("seeds", seeds)):
        if value:
            changes[name] = value
            command += f" --{name} {shlex.quote(str(value))}"
    with refusals():
        write_results(console, table, planned, folder, command, changes)
    if any(job.error for _, work in planned for job in work):
        raise typer.Exit(1)


def say_cost(
    console: Console, part: "Part", work: "list[Job]", engine: str, parallel: int,
    measured: "Measured",
) -> None:  # fmt: skip
    """Print the runs of a part and an estimate of their cost; `measured` as in `estimate.cost`."""
    from fedapps.estimate import estimate
    from fedapps.results.formats import as_rich

    say(console, f"{part.name}: {federation_line(work)}")
    console.print(as_rich(estimate(work, engine, parallel, measured)))


def write_results(
    console: Console,
    table: str,
    planned: "list[tuple[Part, list[Job]]]",
    folder: Path,
    command: str,
    changes: dict[str, Any],
) -> None:
    """Print the table, and write it as a page and as the data of the coverage page."""
    from fedapps.files import write_text
    from fedapps.reproduction import FILE, PAGE, as_record, as_table, measured
    from fedapps.results.formats import as_markdown, as_rich
    from fedapps.results.runs import runs_of

    found = []
    for part, work in planned:
        found += measured(part, runs_of(work))
    shown = as_table(table, [part for part, _ in planned], found)
    console.print(as_rich(shown))
    write_text(folder / PAGE, as_markdown(shown))
    write_text(folder / FILE, as_record(table, command, changes, found))
    say(console, f"written: {folder / PAGE}, {folder / FILE}")
