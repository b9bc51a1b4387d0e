"""The `fedapps` command."""

import json
import logging
import signal
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedapps.commands import data, plot, serving, table, tune
from fedapps.console import Allowed, make_console, say, say_error
from fedapps.engines.cluster import check_address
from fedapps.engines.jobs import ENGINES, Job, check_engine, chosen, make_jobs, run_jobs
from fedapps.files import check_writable, opening, write_text
from fedapps.methods import METHODS
from fedapps.results.checkpoint import newest_checkpoint
from fedapps.results.folder import check_former, check_unseen
from fedapps.results.formats import as_rich
from fedapps.results.progress import Display
from fedapps.results.published import Published
from fedapps.results.report import write_report
from fedapps.results.runs import read_runs, runs_of
from fedapps.results.sweep import begun_jobs, finished, keep_finished
from fedapps.results.table import results
from fedapps.settings import ranges
from fedapps.settings.config import (
    Config,
    Experiment,
    check_method,
    combinations,
    construct,
    defaults,
    former_name,
    override,
    parse_experiment,
    read_experiment,
    run_folder,
    saved_configuration,
    saved_runs,
)

MOST_JOBS = 1024
MAIN_METHODS = "fedavg,fedper,tent,fedtta++,pfedhn"
# What `fedapps run` changes where no method and no experiment is named: a federation in which every
# class is trained on, and clients drift little in a round, so that a later client's unlabeled
# inputs are worth something.
MAIN_JOB: Config = {
    "num-clients": 50,
    "rounds": 60,
    "local-steps": 5,
    "batch-size": 32,
    "evaluate-every": 10,
    "fedtta++.clip-norm": 5.0,
    "pfedhn.lr": 0.05,  # 5 steps of 0.005, which is for 50, move a model too little
}

cli = typer.Typer(
    help="Personalized federated learning on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

cli.add_typer(data.app)
cli.command()(table.table)
cli.add_typer(serving.app)
cli.command()(plot.plot)
cli.command("tune")(tune.command)


@cli.command()
def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="An experiment's .toml file; key=value; lr=0.01,0.1 spans a grid."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help='Methods, separated by commas; "tent adapt-steps=5" is one, too.')
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "",
    engine: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(ENGINES)}; by default in-process where every core gets a run "
            "of its own, else ray."
        ),
    ] = "",
    gpus_per_client: Annotated[float, typer.Option(help="Share of a GPU per client.")] = 0.0,
    ray_address: Annotated[
        str, typer.Option(help='Ray cluster to join, host:port; "auto": that of this machine.')
    ] = "",
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results"),
    jobs: Annotated[
        int | None, typer.Option(help="Runs side by side; by default one on each core, or in turn.")
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="Folder of finished runs to start from; 0 rounds if not set."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder of a run, or of several: run what is unfinished to its end."),
    ] = None,
    bound: Annotated[bool, typer.Option(help="Show the generalization bound's terms.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run what is finished again, too; asks before.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    allow: Allowed = None,
) -> None:
    """Train methods and compare them on training and novel clients.

    Runs that the output folder holds finished, under the same configuration, are kept;
    unfinished ones go on from their newest checkpoint."""
    console = make_console()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop in order, as on Ctrl-C
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        if engine:
            check_engine(engine)
        if jobs is not None and not 1 <= jobs <= MOST_JOBS:
            raise ValueError(f"--jobs is {jobs}; it must lie in [1, {MOST_JOBS}]")
        if ray_address and engine not in ("", "ray"):
            raise ValueError(f"--ray-address is for --engine ray, not {engine}")
        if gpus_per_client and engine == "in-process":
            raise ValueError("--gpus-per-client is for --engine ray or flower, not in-process")
        for option, given in (("methods", methods), ("seeds", seeds)):
            also = [a for a in arguments or [] if a.partition("=")[0] in (option, option[:-1])]
            if given and also:
                raise ValueError(f"--{option} is {given!r}, but there is {also[0]}, too; leave one")
        if ray_address:
            check_address(ray_address)
        check_gpus(gpus_per_client, here=not ray_address)
        if resume is not None:
            if arguments or methods or seeds or from_ or bound or fresh:
                raise ValueError("--resume goes on with runs as they are; it takes no settings")
            work, source = begun_jobs(resume), ""
            output = work[0].folder.parent
        else:
            asked = _experiment(arguments or [], methods, seeds, from_)
            work, source = _jobs(asked, output, from_, bound, fresh), asked.source
            check_writable(output)
            if fresh:
                lost = [job.name for job in work if finished(job.folder)]
                question = f"{output} holds finished runs that will be lost: {', '.join(lost)}."
                if lost and not yes and not typer.confirm(f"{question} Go on?"):
                    raise typer.Exit(1)
            else:
                keep_finished(work)
        for job in work:
            if job.config["resume"] and not job.done:
                for refused in newest_checkpoint(job.folder, job.config)[1]:
                    say(console, refused)
        parallel = jobs or 1
        if not engine:
            waiting = sum(not job.done for job in work)
            engine, parallel = chosen(waiting, jobs, ray=bool(ray_address or gpus_per_client))
        check_engine(engine, work, parallel)
        if not output.exists():  # what `flwr run` packs, or a repository, may be around it
            write_text(output / ".gitignore", "*\n")
        if source:
            write_text(output / "experiment.toml", source)
    except (ValueError, OSError) as error:
        say_error(console, error)
        raise typer.Exit(2) from error
    try:
        with Display(work, console, parallel) as display:
            run_jobs(
                work,
                engine,
                parallel=parallel,
                gpus_per_client=gpus_per_client,
                ray_address=ray_address,
                follow=display.follow,
            )
    except (RuntimeError, OSError) as error:
        say_error(console, error)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        _say_failures(console, work)
        say(console, f"stopped; the rounds so far are in {output}")
        raise typer.Exit(130) from None
    runs = runs_of(work)
    console.print(as_rich(results(runs)))
    _say_failures(console, work)
    try:
        say(console, f"results: {output}, to look at: {write_report(runs, output)}")
    except OSError as error:
        say_error(console, f"{error}; make room, then: fedapps report {output}", "no report:")
        raise typer.Exit(1) from error
    if any(job.error for job in work):
        raise typer.Exit(1)


@cli.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `fedapps run` wrote to.")],
) -> None:
    """Write report.html over all runs of a folder: table, curves, clients, settings."""
    console = make_console()
    try:
        runs, problems = read_runs(folder)
        file = write_report(runs, folder, problems)
    except (ValueError, OSError) as error:
        say_error(console, error)
        raise typer.Exit(2) from error
    for problem in problems:
        say(console, problem)
    say(console, file)


@cli.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, datasets, partitions, models, experiments")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what can be named in a configuration."""
    console = make_console()
    if what not in LISTS:
        say_error(console, f"unknown list {what!r}; known: {', '.join(LISTS)}")
        raise typer.Exit(2)
    rows = LISTS[what]()
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    table = Table(*(rows[0] if rows else ["nothing yet"]))
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)


def main() -> None:
    """Entry point."""
    cli()


def check(config: Config) -> None:
    """Raise ValueError for whatever of a configuration can be known to be wrong before a run."""
    from flwr.app import Context, RecordDict

    from clients.models import sized
    from fedapps.clientapp import make_client
    from fedapps.engines.grid import simulated_node
    from fedapps.node.building import client_models, method_model
    from fedapps.serverapp import check_privacy, check_run, check_shots
    from partitions import task

    method = check_method(config["method"])
    check_run(config)
    check_shots(config, method)
    privacy = check_privacy(config, method)
    construct(METHODS[method].strategy, config=config, method=method, privacy=privacy)
    only = [sized(str(config["model"]), str(config["only-model"]))] if config["only-model"] else []
    for network in {str(config["model"]), *client_models(config), *only}:  # before data are dealt
        method_model(method, config | {"model": network}, task(config))
    dealt = len(str(config["client-models"]).split(","))
    for client in range(min(dealt, int(config["num-clients"]))):
        node = dict(simulated_node(client, int(config["num-clients"])))
        make_client(Context(0, 0, node, RecordDict(), config), method)


def check_gpus(share: float, *, here: bool) -> None:
    """Raise ValueError for a share of a GPU that no client can have, on this machine if it runs
    `here`: Ray would wait for it."""
    from torch import cuda

    if not 0 <= share <= 64:
        raise ValueError(f"--gpus-per-client is {share}; it must lie in [0, 64]")
    if here and share > (there := cuda.device_count()):
        raise ValueError(f"--gpus-per-client is {share}, but this machine has {there} GPUs")


def _jobs(
    asked: Experiment, output: Path, from_: Path | None, bound: bool, fresh: bool
) -> list[Job]:
    """The runs that are asked for, checked. Raises ValueError for bad input."""
    changes = asked.settings | ({"bound": True} if bound else {})
    if not asked.methods:
        asked, changes = asked | Experiment(methods=MAIN_METHODS), MAIN_JOB | changes
    config = override(defaults(), changes)
    for key, values in asked.grid.items():
        for value in values:
            override(config, {key: value})
    names = combinations(_words("methods", asked.methods), asked.grid)
    numbers = [_whole(word) for word in _words("seeds", asked.seeds or str(config["seed"]))]
    work = make_jobs(config | {"resume": not fresh}, names, numbers, output)
    with opening(from_) if from_ else nullcontext():
        if from_ is not None:
            _go_on_from(from_, work, changes, output, fresh)
        for job in {job.method: job for job in work}.values():
            check(job.config)
    if asked.published:
        Published.read(asked.settings, asked.published)
    return work


def _go_on_from(saved: Path, jobs: list[Job], changes: Config, output: Path, fresh: bool) -> None:
    """Let each job begin with what the run of its name in the folder `saved` ended with."""
    for job in jobs:
        folder = run_folder(saved, former_name(saved, job.method, job.seed))
        check_former(folder, job.method.split()[0])
        before = saved_configuration(folder)
        begun = {"from-dir": str(folder), "resume": not fresh}
        config = override(before, changes | begun)
        job.config = make_jobs(config, [job.method], [job.seed], output)[0].config
        check_unseen(folder, before, job.config, job.method.split()[0])


def _experiment(arguments: list[str], methods: str, seeds: str, saved: Path | None) -> Experiment:
    """What an experiment's file, key=value arguments and options ask for; references in them are
    allowed. Methods and seeds are those of the runs in the folder `saved`, if there is one."""
    files = [a for a in arguments if a.endswith(".toml") and "=" not in a]
    if len(files) > 1:
        raise ValueError(f"one experiment at a time, not {', '.join(files)}")
    typed = parse_experiment([a for a in arguments if a not in files])
    for file in files:
        typed = read_experiment(file) | typed
    typed |= Experiment(methods=methods, seeds=seeds)
    typed.allow()
    if saved is None:
        return typed
    methods, seeds = saved_runs(saved)
    return Experiment({"rounds": 0}, methods=methods, seeds=seeds) | typed


def _say_failures(console: Console, work: list[Job]) -> None:
    """What ended each job that failed."""
    for job in work:
        if job.error:
            say_error(console, job.error, f"{job.name} failed:")


def _words(what: str, text: str) -> list[str]:
    """The entries of a list. Raises ValueError for an empty one and for one named twice."""
    words = [" ".join(word.split()) for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{what} are {text!r}; name one at least")
    if twice := [word for word, count in Counter(words).items() if count > 1]:
        raise ValueError(f"{what} name {twice[0]!r} twice")
    return words


def _whole(word: str) -> int:
    if not word.isdecimal():
        raise ValueError(f"seed {word!r} is not a whole number")
    return int(ranges.check("seed", int(word), 0))


def _text(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _methods() -> list[dict[str, Any]]:
    from clients.base import Client

    return [
        {
            "name": name,
            "paper": method.paper,
            "line": method.line,
            "novel clients": method.novel or "no",
            "privacy": ", ".join(method.dp) or "no",
            "own client": method.client is not Client,
        }
        for name, method in METHODS.items()
    ]


def _datasets() -> list[dict[str, Any]]:
    from partitions.datasets import DATASETS, info

    return [
        {
            "name": name,
            "shape": str(info(name).shape),
            "classes": info(name).num_classes,
            "line": info(name).line,
        }
        for name in DATASETS
    ]


def _partitions() -> list[dict[str, Any]]:
    from partitions.registry import PARTITIONS

    return [
        {"name": name, "line": entry.line, "options": ", ".join(entry.options)}
        for name, entry in PARTITIONS.items()
    ]


def _models() -> list[dict[str, Any]]:
    from clients.models import MODELS

    return [{"name": name, "line": model.line} for name, model in MODELS.items()]


def _experiments() -> list[dict[str, Any]]:
    from fedapps.settings.config import experiments

    return [
        {"name": name, "line": file.read_text("utf-8").partition("\n")[0].lstrip("# ")}
        for name, file in experiments().items()
    ]


LISTS = {
    "methods": _methods,
    "datasets": _datasets,
    "partitions": _partitions,
    "models": _models,
    "experiments": _experiments,
}
