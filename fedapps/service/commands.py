"""`fedapps show` and `fedapps personalize`: what a finished run is, and a model from it."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedapps.console import say_error
from fedapps.files import HANDOUT, MODEL

app = typer.Typer(pretty_exceptions_enable=False)

GETS = {
    "global": "the global model, as it is",
    "adapted": "a model of its own, from unlabeled inputs",
    "": "nothing without labels; other methods can: fedapps list methods",
}
RunFolder = Annotated[Path, typer.Argument(help="A finished run's folder, <method>-seed<seed>.")]


@app.command()
def show(run: RunFolder) -> None:
    """Tell what a finished run is, and what a later client would get from it."""
    from fedapps.methods import METHODS
    from fedapps.service.run import Run

    console = Console()
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
    spent = f"{privacy['epsilon']:.3g} at δ = {privacy['delta']:g}" if privacy else "none kept"
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
        console.print(f"{name + ':':21}{escape(value)}", highlight=False, soft_wrap=True)


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
) -> None:
    """Give a later client its model: from a finished run, for unlabeled data of its own."""
    from fedapps.service import onnx as exporter
    from fedapps.service.run import Run

    console = Console()
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
    console.print(f"{output}: {files}", soft_wrap=True, highlight=False)


TOLD = ("adapt-steps", "entropy-before", "entropy", "epsilon", "delta")


def refused(console: Console, error: Exception) -> typer.Exit:
    """Print why it cannot be done; the exit to raise."""
    say_error(console, error)
    return typer.Exit(2)


def _percent(told: dict[str, float]) -> str:
    accuracy = told.get("accuracy")
    return "–" if accuracy is None else f"{100 * accuracy:.2f} %"
