"""Folders of finished runs, written by hand, for tests of tables, figures and reports."""

import json

import tomli_w

from fedapps.saved import CLIENTS, DIGESTS, SUMMARY, digest, digest_of_folder
from fedapps.service.delivery import DESCRIPTION, REPORT
from fedapps.settings.config import defaults
from fedapps.settings.variants import Variant


def leave(folder, label, seed, novel, *, train=(0.5, 0.5), last=None, curve=(), **settings):
    """A run with these accuracies of training and novel clients; `last` are those of the novel
    clients at the last round, `curve` the training clients' by round. Client ids count from 0,
    training clients first."""
    variant = Variant.parse(label)
    config = variant.apply(defaults() | settings) | {"seed": seed}
    run = folder / variant.folder(seed)
    run.mkdir(parents=True)
    (run / "config.toml").write_text(tomli_w.dumps(config | {"versions": {"flwr": "9.9"}}))
    result = scores(train, novel)
    summary = {
        **{key: config[key] for key in ("method", "dataset", "partition", "model", "seed")},
        **{"engine": "in-process", "rounds": len(curve), "best_round": 1, **result},
        "last": scores(train, last) if last else result,
        "megabytes_per_client_round": {"down": 1.0, "up": 2.0},
        "seconds": 3.0,
        "dropped_replies": 0,
        "finished": True,
    }
    (run / "summary.json").write_text(json.dumps(summary))
    rounds = [{"round": n, "evaluation": {"train-accuracy": a}} for n, a in enumerate(curve, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    return run


def vouch(folder, name=SUMMARY):
    """Let the summary, or another JSON file, vouch for the files with arrays that are there."""
    digests = {file.name: of(file) for file in folder.glob("*.safetensors")}
    if (folder / CLIENTS).is_dir():
        clients = {file.name: of(file) for file in (folder / CLIENTS).glob("*.safetensors")}
        digests[CLIENTS] = digest_of_folder(clients)
    file = folder / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    if name == REPORT:
        digests[DESCRIPTION] = of(folder / DESCRIPTION)
    file.write_text(json.dumps(content | {DIGESTS: digests}))


def of(file):
    """A file's digest; that of nothing if there is no such file."""
    return digest(file.read_bytes() if file.is_file() else b"")


def scores(train, novel):
    """Both groups as in a summary."""
    groups = {"train": train, "novel": novel}
    evaluation = {}
    for role, values in groups.items():
        if values:
            evaluation[f"{role}-accuracy"] = sum(values) / len(values)
            evaluation[f"{role}-clients"] = len(values)
    everyone = [(role, value) for role, values in groups.items() for value in values]
    return {
        "evaluation": evaluation,
        "per_client": {
            str(i): {"role": role, "accuracy": value, "examples": 10 + i}
            for i, (role, value) in enumerate(everyone)
        },
    }
