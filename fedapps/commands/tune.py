"""``fedapps tune``: the best settings of an experiment's methods, by validation alone."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedapps.commands.tuning import Search, Tuning, best
from fedapps.console import make_console, say, say_error
from fedapps.engines.jobs import ENGINES, Job, check_engine, run_jobs
from fedapps.results.progress import Display
from fedapps.settings.config import (
    Experiment,
    defaults,
    override,
    parse_experiment,
    read_experiment,
)


def command(
    experiment: Annotated[str, typer.Argument(help="An experiment's file with a [search] table.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="key=value overrides.")] = None,
    methods: Annotated[str, typer.Option(help="Methods; default: the experiment's.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds that a trial is the mean of.")] = "0",
    trials: Annotated[int, typer.Option(help="Trials of each method.")] = 20,
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}.")] = "in-process",
    jobs: Annotated[int, typer.Option(help="Trials side by side.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder of study.db, best.toml, …")] = Path("tuning"),
) -> None:
    """Search settings by the training clients' validation; goes on where it was stopped."""
    console = make_console()
    logging.getLogger("flwr").setLevel(logging.ERROR)

    def run(work: list[Job]) -> None:
        with Display(work, console) as display:
            run_jobs(work, engine, parallel=jobs, follow=display.follow)

    try:
        check_engine(engine)
        for name, value in (("--trials", trials), ("--jobs", jobs)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if bad := [word for word in seeds.split(",") if not word.strip().isdigit()]:
            raise ValueError(f"seed {bad[0]!r} is not a whole number")
        asked = read_experiment(experiment) | parse_experiment(arguments or [])
        asked |= Experiment(methods=methods)
        asked.allow()
        names = [word.strip() for word in asked.methods.split(",") if word.strip()]
        if asked.grid or not names:
            raise ValueError("tune takes methods and single values; what is sought is in [search]")
        config = override(defaults(), asked.settings)
        search = Search.read(asked.search or {}, config)
        numbers = [int(word) for word in seeds.split(",")]
        found = Tuning(config, numbers, search, output, jobs, run).tune(names, trials)
    except ImportError as error:
        say_error(console, f"{error}; pip install 'fedapps[tune]'")
        raise typer.Exit(2) from error
    except (ValueError, OSError) as error:
        say_error(console, error)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        say(console, f"stopped; the same command goes on from {output}")
        raise typer.Exit(130) from None
    chosen = best(found)
    table = Table("method", "trial", "settings", "validation, %", title="trials")
    for one in sorted(found, key=lambda o: (o.method, -(o.validation or 0.0))):
        told = "failed" if one.validation is None else f"{100 * one.validation:.2f}"
        style = "bold" if chosen.get(one.method) is one else None
        words = one.label.removeprefix(one.method).strip()
        table.add_row(one.method, str(one.number), words, told, style=style)
    console.print(table)
    say(console, f"{output}/best.toml, trials.csv, trials.pdf")
    if len(chosen) < len(names):
        raise typer.Exit(1)
