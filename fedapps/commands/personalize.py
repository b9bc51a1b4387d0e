"""`fedapps personalize`: a later client's model, from a finished run."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from fedapps.commands.show import WhichRound
from fedapps.common.tasks import SCORES, Score
from fedapps.console import Allowed, make_console, refusals, say

REPORTED = ("adapt-steps", "entropy-before", "entropy", "epsilon", "delta")


def personalize(
    run: Annotated[
        Path,
        typer.Argument(
            help="A finished run's folder, <method>-seed<seed>; with --update a folder that this"
            " command wrote.",
            exists=True,
            file_okay=False,
        ),
    ],
    data: Annotated[
        Path,
        typer.Argument(
            help="A folder of images, a .npz or .npy, a folder or parquet of the datasets library,"
            " or a client's folder from `fedapps data --export`."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the model and predictions. Default: personal; with --update RUN."
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="The model in RUN goes on with DATA.")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write model.onnx, too.")] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="odpfl-hn: ε of the descriptor. Default: the run's.")
    ] = None,
    skip_broken: Annotated[
        float | None,
        typer.Option(
            help="Share of broken images, or of rows with empty cells, that is left out. Default:"
            " the run's."
        ),
    ] = None,
    round_: WhichRound = "best",
    allow: Allowed = None,
) -> None:
    """Create a later client's model from a finished run and the client's unlabeled data."""
    with refusals():
        from fedapps.files import locked
        from fedapps.service import onnx as exporter
        from fedapps.service.delivery import load_personal
        from fedapps.service.finished_run import FinishedRun

        logging.getLogger("flwr").setLevel(logging.ERROR)  # Flower sets it on import
        if onnx:
            exporter.check_installed()
        fixed = epsilon is None and skip_broken is None and round_ == "best"
        if update and not fixed:
            raise ValueError(
                "--update takes neither --epsilon, --skip-broken nor --round: the model goes on"
            )
        output = output or (run if update else Path("personal"))
        with ExitStack() as locks:
            if update:
                # Of two updates at once the later one would lose what the other has learnt.
                locks.enter_context(locked(run, wait=True))
                model = load_personal(run)
                model.update(data)
            else:
                loaded = FinishedRun(run, round_)
                loaded.check_novel()  # before the data are read
                model = loaded.serve(loaded.inputs(data, skip_broken), epsilon).module()
            if not (update and output.resolve() == run.resolve()):
                output.mkdir(parents=True, exist_ok=True)
                locks.enter_context(locked(output, wait=True))
            model.save(output)
            if onnx:  # still locked: the file must be of the model beside it
                exporter.export(model, model.card.shape, output)
    _summarise(model.report, output)


def _score(score: Score, value: float) -> str:
    """``accuracy 91.00 %`` or ``RMSE 1.87``."""
    name = score.short or score.text
    if score.in_percent:
        return f"{name} {score.shown(value):.2f} %"
    return f"{name} {value:.4g}"


def _summarise(report: dict[str, Any], output: Path) -> None:
    """Print what the model did with the client's inputs, and the files that hold it."""
    console = make_console()
    if "labels" in report:
        scores = []
        for name, score in SCORES.items():
            if name in report:
                scores.append(_score(score, report[name]))
        console.print(f"labels: {report['labels']}; {', '.join(scores)}")
    if "warning" in report.get("inputs", {}):
        say(console, report["inputs"]["warning"])
    line = f"{report['samples']} samples, {report['method']}"
    values = [f"{key} {report[key]:.4g}" for key in REPORTED if key in report]
    if values:
        line += f": {', '.join(values)}"
    console.print(line)
    if "decision" in report:
        say(console, report["decision"])
    names = sorted(file.name for file in output.iterdir())
    say(console, f"{output}: {', '.join(names)}")
