"""`fedapps tune`: a search for settings."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedapps.commands import completion
from fedapps.commands.run import say_failures
from fedapps.common.installed import check_installed
from fedapps.common.signals import exit_code
from fedapps.console import make_console, refusals, say, say_error
from fedapps.engines import ENGINES
from fedapps.planning import check_options, configured

if TYPE_CHECKING:
    from fedapps.engines.jobs import Job
    from fedapps.tuning import Outcome, Tuning


def tune(
    experiment: Annotated[
        str,
        typer.Argument(
            help=r"An experiment with a \[search] table.", autocompletion=completion.arguments
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="key=value overrides.", autocompletion=completion.arguments),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="Methods. Default: the experiment's.", autocompletion=completion.methods),
    ] = "",
    seeds: Annotated[
        str, typer.Option(help="A trial's score is the mean over these. Default: 0.")
    ] = "",
    trials: Annotated[int, typer.Option(help="Trials of each method.")] = 20,
    group: Annotated[
        str,
        typer.Option(
            "--for",
            help="Which model training clients validate: their own (training), or the one that a "
            "novel client would get (novel).",
        ),
    ] = "training",
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}.")] = "in-process",
    jobs: Annotated[int, typer.Option(help="Trials side by side.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder of study.db, best.toml, …")] = Path("tuning"),
) -> None:
    """Search settings by the training clients' validation score; resumes if interrupted."""
    console = make_console()
    try:
        with refusals():
            check_installed("fedapps tune", ("optuna",), "tune")
            check_options(arguments or [], methods, seeds, engine, jobs, 0.0, "")
            if trials < 1:
                raise ValueError(f"--trials is {trials}; it must be at least 1")
            labels, tuning = read_tuning(
                experiment, arguments or [], methods, seeds, output, engine, jobs, group
            )
            outcomes = tuning.tune(labels, trials)
    except KeyboardInterrupt as error:
        say(console, f"stopped; the same command resumes the search in {output}")
        raise typer.Exit(exit_code(error)) from None
    from fedapps.tuning import BEST, FIGURE, TRIALS, best

    winners = best(outcomes)
    console.print(table_of(outcomes, winners))
    written = [name for name in (BEST, TRIALS, FIGURE) if (output / name).is_file()]
    say(console, f"{output}: {', '.join(written)}")
    lost = [label for label in labels if label not in winners]
    if lost:
        first = next(trial for trial in outcomes if trial.method == lost[0])
        say_error(
            console, f"no trial of {', '.join(lost)} succeeded; the first failed: {first.error}"
        )
        raise typer.Exit(1)


def table_of(outcomes: "Sequence[Outcome]", winners: "Mapping[str, Outcome]") -> Table:
    """A row for each trial, the `winners` in bold."""
    from fedapps.common.tasks import score_named
    from fedapps.tuning import heading, shown

    measures = {trial.measure for trial in outcomes}
    title = "trials; the best in bold"
    table = Table("method", "trial", "settings", heading(measures), title=title)
    for trial in outcomes:
        score = "failed"
        if trial.validation is not None:
            digits = 2 if score_named(trial.measure).in_percent else 4
            score = f"{shown(trial.measure, trial.validation):.{digits}f}"
        if len(measures) > 1:
            score = f"{heading([trial.measure])}: {score}"
        style = "bold" if trial == winners.get(trial.method) else None
        table.add_row(trial.method, str(trial.number), trial.settings, score, style=style)
    return table


def read_tuning(
    file: str, arguments: list[str], methods: str, seeds: str, output: Path, engine: str, jobs: int,
    group: str,
) -> "tuple[list[str], Tuning]":  # fmt: skip
    """The methods and the search that are asked for. Raises ValueError for bad input."""
    if group not in ("training", "novel"):
        raise ValueError(f"--for is {group!r}; choose training or novel")
    from fedapps.settings.experiments import (
        Experiment,
        parse_experiment,
        parse_seeds,
        read_experiment,
    )

    changes = parse_experiment(arguments)
    numbers = parse_seeds(seeds or changes.seeds or "0")
    whole = read_experiment(file)
    whole.check_single(file, "tune")
    experiment = whole | changes | Experiment(methods=methods)
    experiment.allow()
    if experiment.grid:
        key = min(experiment.grid)
        raise ValueError(f"{key} has several values; tune takes single ones, and lists in [search]")
    config, labels = configured(experiment)

    # After the checks, since torch takes seconds to load.
    from fedapps.engines.run import run_jobs
    from fedapps.results.progress import Display
    from fedapps.serverapp import APPS
    from fedapps.tuning import Tuning, read_search

    logging.getLogger("flwr").setLevel(logging.ERROR)  # Flower sets it on import

    shown: list[Job] = []  # the first failure

    def run(work: "list[Job]") -> None:
        with Display(work, make_console()) as display:
            run_jobs(work, engine, APPS, parallel=jobs, follow=display.follow)
        if not shown and (failed := [job for job in work if job.error]):
            shown.append(failed[0])
            say_failures(make_console(), shown)

    try:
        readers = [*labels, *filter(None, whole.methods.split(","))]
        search = read_search(experiment.search or {}, config, readers)
    except ImportError as error:
        raise ValueError(f"{error}; pip install 'fedapps[tune]'") from error
    return labels, Tuning(config, numbers, search, output, jobs, run, group)
