"""A finished run as a model on the Hugging Face hub: its card, its files, the upload."""

import json
import shutil
import tempfile
import tomllib
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from fedapps.files import HANDOUT, MODEL, PRIVACY
from fedapps.methods import METHODS
from fedapps.results.card import FILE
from fedapps.results.formats import escape_markdown
from fedapps.results.runs import at_saved_model
from fedapps.results.schema import Rates, Summary
from fedapps.saved import DIGESTS, SUMMARY, SavedFiles, model_round
from fedapps.service.finished_run import FinishedRun
from fedapps.settings.config import Config, defaults

# What serving needs, beside what `write_model` writes itself. Clients' states stay at home, and so
# does `token.json`, by which nodes know their states of the run.
FILES = (MODEL, HANDOUT, "strategy.safetensors")
PATHS = ("output-dir", "data-dir", "from-dir", "serve-dir", "serving")  # of this machine
DATA = ("dataset", "partition.novel-dataset")  # may be paths
MODELS_OF_NOVEL_CLIENTS = {  # by METHODS[…].novel
    "global": "the global model, unchanged",
    "adapted": "a model of its own, from unlabeled inputs",
    "": "nothing without labels; other methods can: fedapps list methods",
}
CARD = """{front}
# {method} on {dataset}

Trained by federated learning with fedapps. {gets}

| | |
|---|---|
{facts}

## Use

```python
import fedapps
from huggingface_hub import snapshot_download

run = fedapps.load(snapshot_download("{repo}"))
model = run.personalize(x)  # x: unlabeled inputs of one client, (n, {shape})
```

## Settings that are no defaults

{settings}
"""


def facts(run: FinishedRun) -> dict[str, str]:
    """What a run is, and what a later client gets from it, as texts by topic."""
    card, summary, method = run.card, run.summary, METHODS[run.method]
    novel, privacy = (summary.get(key) or {} for key in ("novel", "privacy"))
    needs = ["unlabeled inputs"] if method.novel else ["labels, hence training"]
    needs += ["the training clients at hand"] if run.method == "pfl-nearest" else []
    needs += ["the run's public samples"] if method.client.needs_public else []
    spent = "none kept"
    if privacy:
        spent = f"{privacy['epsilon']:.3g} at δ = {privacy['delta']:g}: {privacy.get('terms', '')}"
    classes = ", ".join(card.classes[:10]) + (", …" if len(card.classes) > 10 else "")
    files = [run.folder / name for name in (MODEL, HANDOUT)]
    size = sum(file.stat().st_size for file in files if file.is_file())
    return {
        "method": f"{card.method}: {method.summary} ({method.paper})",
        "data": f"{card.dataset}, partition {run.config['partition']}; "
        f"{len(card.classes)} classes: {classes}",
        "inputs": f"shape {card.shape}, over {card.scale:g}, less {card.mean}, over {card.std}",
        "network": f"{card.model}; {size / 1e6:.2f} MB kept",
        "rounds": f"{summary.get('rounds', '?')}, the model of round {model_round(run.folder)}",
        "accuracy": f"training clients {_percent(_at_saved_model(run))}, novel clients "
        f"{_percent(novel)}",
        "a novel client gets": MODELS_OF_NOVEL_CLIENTS[method.novel],
        "it needs": ", ".join(needs),
        "ε spent in training": spent,
    }


def model_card(run: FinishedRun, repo: str = "") -> str:
    """The run's README.md for the hub, with its front matter; texts of the run are escaped.

    `repo` is the model's name on the hub, such as "lab/fedtta-digits"."""
    from huggingface_hub import EvalResult, ModelCardData

    card, task = run.card, "image-classification" if len(run.card.shape) == 3 else "other"
    results = [
        EvalResult(
            task_type=task,
            dataset_type=card.dataset,
            dataset_name=card.dataset,
            metric_type="accuracy",
            metric_value=group["accuracy"],
            metric_name=f"accuracy of {who} clients (mean)",
        )
        for who, group in (
            ("training", _at_saved_model(run)),
            ("novel", run.summary.get("novel")),
        )
        if group and group.get("accuracy") is not None
    ]
    front = ModelCardData(
        library_name="fedapps",
        tags=["federated-learning", "personalization", "flower", card.method],
        datasets=[card.dataset],
        model_name=f"{card.method} on {card.dataset}",
        eval_results=results or None,
    )
    changed = {k: v for k, v in run.config.items() if k not in PATHS and v != defaults().get(k, v)}
    settings = ", ".join(escape_markdown(f"{key}={value}") for key, value in changed.items())
    escaped = ((name, escape_markdown(text)) for name, text in facts(run).items())
    return CARD.format(
        front=f"---\n{front.to_yaml()}\n---",
        method=escape_markdown(card.method),
        dataset=escape_markdown(card.dataset),
        gets=f"A later client gets {MODELS_OF_NOVEL_CLIENTS[METHODS[run.method].novel]}.",
        facts="\n".join(f"| {name} | {text} |" for name, text in escaped),
        repo=repo or "OWNER/NAME",
        shape=", ".join(map(str, card.shape)),
        settings=settings or "none",
    )


def write_model(run: FinishedRun, folder: Path, repo: str) -> None:
    """Write the card and what serving needs to `folder`, without this machine's paths: of the
    user's data the last component is left."""
    given = {key: Path(str(run.config[key])) for key in DATA}
    names: Config = {key: path.name for key, path in given.items() if path.is_absolute()}
    run, dataset = copy(run), str(names.get("dataset", run.card.dataset))
    run.config, run.card = run.config | names, replace(run.card, dataset=dataset)
    saved = SavedFiles.of_run(run.folder)
    for name in FILES:
        if name in saved:
            (folder / name).write_bytes(saved.read(name))
    if (run.folder / PRIVACY).is_file():
        shutil.copy(run.folder / PRIVACY, folder)
    (folder / "README.md").write_text(model_card(run, repo), "utf-8")
    (folder / FILE).write_text(run.card.text(), "utf-8")
    summary = run.summary | {"dataset": dataset}
    if saved.digests is not None:
        summary[DIGESTS] = {n: d for n, d in saved.digests.items() if n in FILES}
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1), "utf-8")
    config: dict[str, Any] = tomllib.loads((run.folder / "config.toml").read_text("utf-8"))
    config |= names | {key: "" for key in PATHS if key in config}
    (folder / "config.toml").write_text(tomli_w.dumps(config), "utf-8")


def push(run: FinishedRun, repo: str, *, private: bool = False, endpoint: str | None = None) -> str:
    """Upload the run to the hub under the user's own token; returns the address of the commit.

    Raises what `huggingface_hub` raises if the hub refuses."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    api.create_repo(repo, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(run, Path(folder), repo)
        return str(api.upload_folder(repo_id=repo, folder_path=folder).commit_url)


def _at_saved_model(run: FinishedRun) -> Rates:
    """The training clients' scores at the round of the saved model; {} if they are unknown."""
    try:
        return at_saved_model(Summary.model_validate(run.summary))
    except ValueError:  # it failed before its first evaluation
        return {}


def _percent(group: dict[str, Any]) -> str:
    """The accuracy of a group of clients; – if there is none."""
    accuracy = group.get("accuracy")
    return "–" if accuracy is None else f"{100 * accuracy:.2f} %"
