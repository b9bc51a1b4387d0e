"""A finished run as a model on the Hugging Face hub: its card, its files, the upload."""

import json
import shutil
import tempfile
from copy import copy
from dataclasses import replace
from pathlib import Path

import tomli_w

from fedapps.common.tasks import LABELS, TASKS, VALUES, Score
from fedapps.files import PRIVACY
from fedapps.methods import METHODS
from fedapps.results.card import FILE, Card
from fedapps.results.formats import escape_markdown
from fedapps.results.runs import SHORT_ROLES, at_saved_model
from fedapps.results.schema import Rates, Summary
from fedapps.saved import DIGESTS, HANDOUT, MODEL, SUMMARY, SavedFiles, model_round
from fedapps.service.finished_run import FinishedRun
from fedapps.settings.config import Config, defaults
from fedapps.settings.saved_configurations import configuration_file

# What serving needs, beside what `write_model` writes itself. Clients' states stay at home, and so
# does `token.json`, by which nodes know their states of the run.
FILES = (MODEL, HANDOUT, "strategy.safetensors")
PATHS = ("output-dir", "data-dir", "from-dir", "serve-dir", "serving")  # of this machine
DATA = ("dataset", "partition.novel-dataset")  # may be paths
SHOWN_CLASSES = 10  # names of classes that the card lists
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
    card = run.card
    method = METHODS[run.method]
    main = TASKS[card.task].main
    classes = ", ".join(card.classes[:SHOWN_CLASSES])
    if len(card.classes) > SHOWN_CLASSES:
        classes += ", …"
    size = 0
    for name in (MODEL, HANDOUT):
        file = run.folder / name
        if file.is_file():
            size += file.stat().st_size
    scores = _scores_of(run)
    novel = _value(scores.get(f"novel-{main.name}"), main)
    training = _value(scores.get(f"train-{main.name}"), main)
    rounds = run.summary.get("rounds", "?")
    return {
        "method": f"{card.method}: {method.summary} ({method.paper})",
        "data": f"{card.dataset}, partition {run.config['partition']}; {_labels(card, classes)}",
        "inputs": f"shape {card.shape}, over {card.scale:g}, less {card.mean}, over {card.std}",
        "network": f"{card.model}; {size / 1e6:.2f} MB kept",
        "rounds": f"{rounds}, the model of round {model_round(run.folder)}",
        main.short or main.text: f"training clients {training}, novel clients {novel}",
        "a novel client gets": MODELS_OF_NOVEL_CLIENTS[method.novel],
        "it needs": ", ".join(_needs(run)),
        "ε spent in training": _spent(run),
    }


def _needs(run: FinishedRun) -> list[str]:
    """What a novel client must have to get its model."""
    method = METHODS[run.method]
    needs = ["unlabeled inputs" if method.novel else "labels, hence training"]
    if run.method == "pfl-nearest":
        # It asks them how near they are to the novel client.
        needs.append("the training clients at hand")
    if method.client.needs_public:
        needs.append("the run's public samples")
    return needs


def _spent(run: FinishedRun) -> str:
    """ε and δ of the training, and what they bound."""
    privacy = run.summary.get("privacy")
    if not privacy:
        return "none kept"
    return f"{privacy['epsilon']:.3g} at δ = {privacy['delta']:g}: {privacy.get('terms', '')}"


def model_card(run: FinishedRun, repo: str = "") -> str:
    """The run's README.md for the hub, with its front matter; texts of the run are escaped.

    `repo` is the model's name on the hub, such as "lab/fedtta-digits"."""
    from huggingface_hub import EvalResult, ModelCardData

    card = run.card
    scores = _scores_of(run)
    main = TASKS[card.task].main
    task = "image-classification" if len(card.shape) == 3 else "other"
    if card.task == VALUES:
        task = "tabular-regression" if len(card.shape) == 1 else "other"
    results = []
    for role, word in SHORT_ROLES.items():
        score = scores.get(f"{role}-{main.name}")
        if score is None:
            continue
        results.append(
            EvalResult(
                task_type=task,
                dataset_type=card.dataset,
                dataset_name=card.dataset,
                metric_type=main.name,
                metric_value=score,
                metric_name=f"{main.text} of {word} clients (mean)",
            )
        )
    front = ModelCardData(
        library_name="fedapps",
        tags=["federated-learning", "personalization", "flower", card.method],
        datasets=[card.dataset],
        model_name=f"{card.method} on {card.dataset}",
        eval_results=results or None,
    )
    known = defaults()
    changed = []
    for key, value in run.config.items():
        if key not in PATHS and value != known.get(key, value):
            changed.append(escape_markdown(f"{key}={value}"))
    rows = []
    for topic, text in facts(run).items():
        rows.append(f"| {topic} | {escape_markdown(text)} |")
    return CARD.format(
        front=f"---\n{front.to_yaml()}\n---",
        method=escape_markdown(card.method),
        dataset=escape_markdown(card.dataset),
        gets=f"A later client gets {MODELS_OF_NOVEL_CLIENTS[METHODS[run.method].novel]}.",
        facts="\n".join(rows),
        repo=repo or "OWNER/NAME",
        shape=", ".join(map(str, card.shape)),
        settings=", ".join(changed) or "none",
    )


def write_model(run: FinishedRun, folder: Path, repo: str) -> None:
    """Write the card and what serving needs to `folder`, without this machine's paths: of the
    user's data the last component is left."""
    names: Config = {}
    for key in DATA:
        path = Path(str(run.config[key]))
        if path.is_absolute():
            names[key] = path.name
    dataset = str(names.get("dataset", run.card.dataset))
    # A copy, because the caller's run still needs its paths.
    run = copy(run)
    run.config = run.config | names
    run.card = replace(run.card, dataset=dataset)
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
        # Of the files that are left out no digest can be checked.
        summary[DIGESTS] = {name: d for name, d in saved.digests.items() if name in FILES}
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1), "utf-8")
    # Read from the file, because `run.config` lacks the libraries' versions.
    config = configuration_file(run.folder) | names
    for key in PATHS:
        if key in config:
            config[key] = ""
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


def _scores_of(run: FinishedRun) -> Rates:
    """The scores of training and novel clients at the round of the saved model, without those that
    are unknown."""
    try:
        summary = Summary.model_validate(run.summary)
    except ValueError:  # it failed before its first evaluation
        return {}
    scores = dict(at_saved_model(summary))
    for name, value in summary.evaluation.items():
        if name.startswith("novel-"):
            scores[name] = value
    return scores


def _value(value: float | None, score: Score) -> str:
    """The score of a group of clients; – if it is unknown."""
    if value is None:
        return "–"
    return f"{score.shown(value):.2f} %" if score.in_percent else f"{value:.4g}"


def _labels(card: Card, names: str) -> str:
    """What the network predicts: how many classes, labels or values, with the `names`."""
    if card.task == VALUES:
        word = "value" if len(card.classes) == 1 else "values"
        return f"{len(card.classes)} {word}: {names}"
    word = "labels at once" if card.task == LABELS else "classes"
    return f"{len(card.classes)} {word}: {names}"
