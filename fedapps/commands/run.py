"""`fedapps run`: train methods and compare them on training and novel clients."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from fedapps.commands import options
from fedapps.common.signals import exit_code
from fedapps.console import Allowed, make_console, refusals, say, say_error
from fedapps.planning import (
    caveat_lines,
    check_options,
    data_line,
    federation_line,
    keep_or_discard,
    plan,
    prepare,
    read_request,
    say_stopped,
    share_trainings,
    size_lines,
    trainings_lines,
)
from fedapps.settings.experiments import parts

if TYPE_CHECKING:
    from fedapps.engines.jobs import Job
    from fedapps.estimate import Measured


def run(
    arguments: options.Arguments = None,
    methods: options.Methods = "",
    seeds: options.Seeds = "",
    output: options.Output = Path("results"),
    dry_run: options.DryRun = False,
    bound: options.Bound = False,
    from_: options.From = None,
    resume: options.Resume = None,
    fresh: options.Fresh = False,
    yes: options.Yes = False,
    engine: options.Engine = "",
    jobs: options.Jobs = None,
    gpus_per_client: options.GpusPerClient = 0.0,
    ray_address: options.RayAddress = "",
    debug: options.Debug = False,
    allow: Allowed = None,
) -> None:
    """Train methods and compare them on training and novel clients.

    Finished runs in the output folder are kept if their settings are the same.
    Unfinished runs resume from their newest checkpoint."""
    console = make_console()
    with refusals():
        check_options(
            arguments or [], methods, seeds, engine, jobs, gpus_per_client, ray_address, debug
        )
        engine = "in-process" if debug else engine
        if resume is not None:
            work = resumed(resume, any((arguments, methods, seeds, from_, bound, fresh)))
            planned = [(work, work[0].folder.parent, "")]
        else:
            experiment = read_request(arguments or [], methods, seeds, from_)
            # All parts are checked before the first one trains.
            planned = []
            for part, place in parts(experiment, output):
                planned.append((plan(part, place, from_, bound, fresh), place, part.source))
            for work, place, _ in planned:
                keep_or_discard(work, place, fresh, yes or dry_run)
        for work, _, _ in planned:
            share_trainings(work)
    failed = False
    for work, place, source in planned:
        with refusals():
            announce(console, work)
            measured: Measured = {}
            used, parallel = choose(
                console, work, engine, jobs, measured, ray=bool(ray_address or gpus_per_client)
            )
            if dry_run:
                print_estimate(console, work, used, parallel, measured)
                continue
            prepare(console, work, place, source)
        with imports_kept():
            try:
                carry_out(
                    console, work, used, parallel=parallel, gpus_per_client=gpus_per_client,
                    ray_address=ray_address, debug=debug,
                )  # fmt: skip
            except KeyboardInterrupt as error:
                say_failures(console, work)
                say_stopped(console, work, place)
                if len(planned) > 1:
                    say(console, "the same command continues all parts of the experiment")
                raise typer.Exit(exit_code(error)) from None
            failed |= report_results(console, work, place)
    if failed:
        raise typer.Exit(1)


def announce(console: Console, work: "list[Job]") -> None:
    """Print what the runs train on, and what is to know of their methods."""
    say(console, federation_line(work))
    about_data = data_line(work)
    if about_data:
        say(console, about_data)
    for line in [*size_lines(work), *caveat_lines(work), *trainings_lines(work)]:
        say(console, line)


def print_estimate(
    console: Console, work: "list[Job]", engine: str, parallel: int, measured: "Measured"
) -> None:
    """Print the time, the memory and the traffic that the runs will take; `measured` as in
    `estimate.cost`."""
    from fedapps.estimate import estimate
    from fedapps.results.formats import as_rich

    console.print(as_rich(estimate(work, engine, parallel, measured)))


@contextmanager
def imports_kept() -> Iterator[None]:
    """Within the context the garbage collector leaves the modules alone that are imported already:
    each search of torch's takes a fifth of a second. What a caller in this process has frozen stays
    frozen."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def resumed(folder: Path, more: bool) -> "list[Job]":
    """The unfinished runs in a folder. Raises ValueError if `more` is asked for."""
    if more:
        raise ValueError("--resume continues runs as they are; it takes no settings")
    from fedapps.results.sweep import begun_jobs

    return begun_jobs(folder)


def choose(
    console: Console, work: "list[Job]", engine: str, jobs: int | None, measured: "Measured", *,
    ray: bool,
) -> tuple[str, int]:  # fmt: skip
    """The engine and the number of runs side by side; prints why, if the user named no engine.
    `measured` as in `estimate.cost`.

    Raises ValueError if the engine cannot run the jobs."""
    from fedapps.engines.jobs import check_engine

    parallel = jobs or 1
    if not engine:
        from fedapps.engine_choice import choose_engine

        choice = choose_engine(work, jobs, ray=ray, measured=measured)
        engine, parallel = choice.engine, choice.parallel
        if choice.reason:
            say(console, choice.line)
    check_engine(engine, work, parallel)
    return engine, parallel


def carry_out(console: Console, work: "list[Job]", engine: str, **how: Any) -> None:
    """Run the jobs; exit with 1 if the engine fails. With `debug` the first error is raised."""
    from fedapps.engines import run as engines
    from fedapps.results.progress import Display
    from fedapps.serverapp import APPS

    logging.getLogger("flwr").setLevel(logging.ERROR)  # Flower sets it on import
    progress = Display(work, console, how["parallel"])
    caught = nullcontext() if how["debug"] else refusals(RuntimeError, code=1)
    with caught, progress as display:
        engines.run_jobs(work, engine, APPS, follow=display.follow, **how)


def report_results(console: Console, work: "list[Job]", output: Path) -> bool:
    """Print the table, the failures and the report's path; whether a run failed."""
    from fedapps.results import table
    from fedapps.results.formats import as_rich
    from fedapps.results.runs import runs_of

    console.print(as_rich(table.results(runs_of(work))))
    say_failures(console, work)
    make_report(console, work, output)
    return any(job.error for job in work)


def make_report(console: Console, work: "list[Job]", output: Path) -> None:
    """Write the report of all runs in the folder, and print its path; exit with 1 on a full
    disk."""
    from fedapps.results import report
    from fedapps.results.runs import read_runs

    try:
        runs, problems = read_runs(output, work)
        page = report.write_report(runs, output, problems)
        runs_text = f"all {len(runs)} runs" if len(runs) > 1 else "the run"
        say(console, f"results: {output}, report of {runs_text} in it: {page}")
    except OSError as error:
        say_error(console, f"{error}; free some space, then: fedapps report {output}", "no report:")
        raise typer.Exit(1) from error


def say_failures(console: Console, work: "list[Job]") -> None:
    """Print the error of each job that failed, and the first cause of failed replies, or what the
    server raised; equal causes once."""
    from fedapps.files import ERRORS

    shown = set()
    for job in work:
        if job.error:
            say_error(console, job.error, f"{job.name} failed:")
        undone = job.undone_rounds()
        if undone:
            say_error(
                console,
                f"{undone} of {job.summary()['rounds']} rounds were undone: NaN or infinity would "
                "have come into the model",
                f"{job.name}:",
            )
        causes = job.failures()
        if not causes:
            continue
        # The server's error ended the run. Of clients' errors the first may have caused the others.
        cause = causes[-1] if causes[-1].startswith("server\n") else causes[0]
        what, _, text = cause.partition("\n")
        if text in shown:
            say(console, f"{job.name}, {what}, as above")
        else:
            shown.add(text)
            say(console, f"{job.name}, {what}")
            for line in text.splitlines():
                say(console, f"  {line}")
        if len(causes) > 1:
            say(console, f"{len(causes)} causes in {job.folder / ERRORS}")
