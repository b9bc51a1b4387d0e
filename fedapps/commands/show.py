"""`fedapps show`: what a finished run is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedapps.console import Allowed, make_console, refusals, say

MODELS_OF_NOVEL_CLIENTS = {  # by METHODS[…].novel
    "global": "the global model, unchanged",
    "adapted": "a model of its own, from unlabeled inputs",
    "": "nothing without labels; other methods can: fedapps list methods",
}
RunFolder = Annotated[
    Path,
    typer.Argument(
        help="A finished run's folder, <method>-seed<seed>.", exists=True, file_okay=False
    ),
]


def show(run: RunFolder, allow: Allowed = None) -> None:
    """Show what a finished run is, and what a later client would get from it."""
    from fedapps.files import HANDOUT, MODEL
    from fedapps.methods import METHODS
    from fedapps.service.run import Run

    with refusals():
        loaded = Run(run)
    card, summary, method = loaded.card, loaded.summary, METHODS[loaded.method]
    train, novel, privacy = (summary.get(key) or {} for key in ("train", "novel", "privacy"))
    needs = ["unlabeled inputs"] if method.novel else ["labels, hence training"]
    needs += ["the training clients at hand"] if loaded.method == "pfl-nearest" else []
    needs += ["the run's public samples"] if method.client.needs_public else []
    spent = "none kept"
    if privacy:
        spent = f"{privacy['epsilon']:.3g} at δ = {privacy['delta']:g}: {privacy.get('terms', '')}"
    classes = ", ".join(card.classes[:10]) + (", …" if len(card.classes) > 10 else "")
    files = [loaded.folder / name for name in (MODEL, HANDOUT)]
    size = sum(file.stat().st_size for file in files if file.is_file())
    rows = {
        "method": f"{card.method}: {method.line} ({method.paper})",
        "data": f"{card.dataset}, partition {loaded.config['partition']}; "
        f"{len(card.classes)} classes: {classes}",
        "inputs": f"shape {card.shape}, over {card.scale:g}, less {card.mean}, over {card.std}",
        "network": f"{card.model}; {size / 1e6:.2f} MB kept",
        "rounds": f"{summary.get('rounds', '?')}, the model of round "
        f"{summary.get('best_round', '?')}",
        "accuracy": f"training clients {percent(train)}, novel clients {percent(novel)}",
        "a novel client gets": MODELS_OF_NOVEL_CLIENTS[method.novel],
        "it needs": ", ".join(needs),
        "ε spent in training": spent,
        "serve it": f"fedapps personalize {run} DATA" if method.novel else "fedapps serve",
    }
    console = make_console()
    for name, value in rows.items():
        say(console, f"{name + ':':21}{value}")


def percent(group: dict[str, Any]) -> str:
    """The accuracy of a group of clients; – if there is none."""
    accuracy = group.get("accuracy")
    return "–" if accuracy is None else f"{100 * accuracy:.2f} %"
