"""`fedapps show`, `personalize`, `serve` and `deploy`: finished runs, their clients, and nodes."""

import logging
import os
import time
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapps.console import Allowed, make_console, say, say_error
from fedapps.files import HANDOUT, MODEL

app = typer.Typer(pretty_exceptions_enable=False)

GETS = {
    "global": "the global model, as it is",
    "adapted": "a model of its own, from unlabeled inputs",
    "": "nothing without labels; other methods can: fedapps list methods",
}
RunFolder = Annotated[Path, typer.Argument(help="A finished run's folder, <method>-seed<seed>.")]


@app.command()
def show(run: RunFolder, allow: Allowed = None) -> None:
    """Tell what a finished run is, and what a later client would get from it."""
    from fedapps.methods import METHODS
    from fedapps.service.run import Run

    console = make_console()
    try:
        found = Run(run)
    except (ValueError, OSError) as error:
        raise refused(console, error) from error
    card, entry, config = found.card, METHODS[found.method], found.config
    trained = found.summary.get("train") or {}
    novel = found.summary.get("novel") or {}
    privacy = found.summary.get("privacy") or {}
    needs = ["unlabeled inputs"] if entry.novel else ["labels, hence training"]
    needs += ["the training clients at hand"] if found.method == "pfl-nearest" else []
    needs += ["the run's public samples"] if entry.client.needs_public else []
    spent = "none kept"
    if privacy:
        spent = f"{privacy['epsilon']:.3g} at δ = {privacy['delta']:g}: {privacy.get('terms', '')}"
    classes = ", ".join(card.classes[:10]) + (", …" if len(card.classes) > 10 else "")
    size = sum((found.folder / f).stat().st_size for f in (MODEL, HANDOUT)
               if (found.folder / f).is_file())  # fmt: skip
    rows = {
        "method": f"{card.method}: {entry.line} ({entry.paper})",
        "data": f"{card.dataset}, dealt by {config['partition']}; {len(card.classes)} classes: "
        f"{classes}",
        "inputs": f"shape {card.shape}, over {card.scale:g}, less {card.mean}, over {card.std}",
        "network": f"{card.model}; {size / 1e6:.2f} MB kept",
        "rounds": f"{found.summary.get('rounds', '?')}, the model of round "
        f"{found.summary.get('best_round', '?')}",
        "accuracy": f"training clients {_percent(trained)}, novel clients {_percent(novel)}",
        "a novel client gets": GETS[entry.novel],
        "it needs": ", ".join(needs),
        "ε spent in training": spent,
        "serve it": f"fedapps personalize {run} DATA" if entry.novel else "fedapps serve",
    }
    for name, value in rows.items():
        say(console, f"{name + ':':21}{value}")


@app.command()
def personalize(
    run: RunFolder,
    data: Annotated[
        Path,
        typer.Argument(
            help="A folder of images, a .npz or .npy, a folder or parquet of the datasets library,"
            " or a client's folder from `fedapps data --export`."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the model and predictions.")] = Path(
        "personal"
    ),
    onnx: Annotated[bool, typer.Option("--onnx", help="Write model.onnx, too.")] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="odpfl-hn: ε of the descriptor; as the run's if not set.")
    ] = None,
    allow: Allowed = None,
) -> None:
    """Give a later client its model: from a finished run, for unlabeled data of its own."""
    from fedapps.service import onnx as exporter
    from fedapps.service.run import Run

    console = make_console()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        if onnx:
            exporter.check_installed()
        found = Run(run)
        found.check_novel()
        served = found.serve(found.inputs(data), epsilon)
        served.write(output)
        if onnx:
            exporter.export(served.module(), found.card.shape, output)
    except (ValueError, OSError) as error:
        raise refused(console, error) from error
    report = served.report()
    if "accuracy" in report:
        console.print(f"labels: {report['labels']}; accuracy {100 * report['accuracy']:.2f} %")
    told = [f"{key} {report[key]:.4g}" for key in TOLD if key in report]
    console.print(f"{report['samples']} samples, {found.method}: {', '.join(told)}")
    files = ", ".join(sorted(file.name for file in output.iterdir()))
    say(console, f"{output}: {files}")


@app.command()
def serve(
    run: RunFolder,
    deployment: Annotated[
        Path | None, typer.Option(help="Folder of `fedapps deploy` whose SuperLink is used.")
    ] = None,
    superlink: Annotated[
        str, typer.Option(help="Else a SuperLink's name in Flower's config.toml.")
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="Also who has its model already.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between looks at who is there.")] = 30.0,
    allow: Allowed = None,
) -> None:
    """Serve a finished run to the nodes of a SuperLink, until Ctrl-C: a line for each node."""
    from fedapps.engines.flower import Flwr
    from fedapps.service.deploy import Deployment
    from fedapps.service.run import Run
    from fedapps.service.serving import LINE, check_serving

    console = make_console()
    try:
        if bool(deployment) == bool(superlink):
            raise ValueError("name either --deployment or --superlink")
        found = Run(run)
        config = found.config | {"serve-dir": str(found.folder), "serving": found.card.line()}
        config |= {"serve-every": every, "serve-again": again}
        check_serving(config)
        home = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser()
        command = Deployment.read(deployment).flwr() if deployment else Flwr(home, superlink)
        number = command.submit(config)
    except (ValueError, OSError, RuntimeError) as error:
        raise refused(console, error) from error
    console.print(f"serving {found.method} as run {number}; Ctrl-C ends it", highlight=False)
    shown = 0
    try:
        while True:  # a SuperLink that restarts ends the log, but not the run
            lines = (line.partition(LINE)[2] for line in command.follow(number) if LINE in line)
            for line in islice(lines, shown, None):
                say(console, line.strip())
                shown += 1
            if command.status(number)[0].startswith("finished"):
                break
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        command.cancel(number)
        console.print("stopped")
        return
    say_error(console, command.error(number) or "the run ended")
    raise typer.Exit(1)


@app.command()
def deploy(
    folder: Annotated[Path, typer.Argument(help="Folder of the deployment.")],
    nodes: Annotated[int, typer.Option(help="Write one of so many nodes.")] = 0,
    tls: Annotated[bool, typer.Option("--tls", help="Certificates, and a key per node.")] = False,
    host: Annotated[str, typer.Option(help="The SuperLink's address or name.")] = "127.0.0.1",
    data: Annotated[
        Path | None, typer.Option(help="A folder for each node, from `fedapps data --export`.")
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Start it on this machine.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Tell what is alive.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End what --start started.")] = False,
    only: Annotated[str, typer.Option(help='Of these alone: "superlink,node-0".')] = "",
) -> None:
    """Write what a small federation of real nodes needs; start it, look at it, stop it."""
    from fedapps.service.deploy import SUPERLINK, Deployment, plan

    console = make_console()
    try:
        if nodes:
            if (folder / "run").is_dir() and any((folder / "run").iterdir()):
                raise ValueError(f"{folder} may be running; first: fedapps deploy {folder} --stop")
            plan(folder, nodes, tls=tls, host=host, data=data).write()
        found = Deployment.read(folder)
        known = [SUPERLINK, *found.nodes]
        names = [name.strip() for name in only.split(",") if name.strip()] or known
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
        if stop:
            found.stop(names)
        if start:
            found.start(names)
    except (ValueError, OSError, RuntimeError) as error:
        raise refused(console, error) from error
    for name in names if status or start or stop else ():
        console.print(f"{name}: {'alive' if found.alive(name) else 'down'}", highlight=False)
    if nodes:
        console.print(f"{folder}: {len(known)} start scripts; read {folder / 'README.md'}")


LOOK_SECONDS = 5.0  # until a SuperLink that went away is looked for again
TOLD = ("adapt-steps", "entropy-before", "entropy", "epsilon", "delta")


def refused(console: Console, error: Exception) -> typer.Exit:
    """Print why it cannot be done; the exit to raise."""
    say_error(console, error)
    return typer.Exit(2)


def _percent(told: dict[str, float]) -> str:
    accuracy = told.get("accuracy")
    return "–" if accuracy is None else f"{100 * accuracy:.2f} %"
