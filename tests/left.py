"""What finished runs leave, written by hand: folders to make tables, figures and reports of."""

import json

import tomli_w

from fedapps.settings.config import defaults, folder_name, variant


def leave(folder, label, seed, novel, *, train=(0.5, 0.5), last=None, curve=(), **settings):
    """A run whose training and novel clients end with these accuracies; `last`: at the last round.

    Its clients are numbered through, training ones first; `curve` are the training clients'
    accuracies by round."""
    config = variant(defaults() | settings, label) | {"seed": seed}
    run = folder / folder_name(label, seed)
    run.mkdir(parents=True)
    (run / "config.toml").write_text(tomli_w.dumps(config | {"versions": {"flwr": "9.9"}}))
    result = told(train, novel)
    summary = {
        **{key: config[key] for key in ("method", "dataset", "partition", "model", "seed")},
        **{"engine": "in-process", "rounds": len(curve), "best_round": 1, **result},
        "last": told(train, last) if last else result,
        "megabytes_per_client_round": {"down": 1.0, "up": 2.0},
        "seconds": 3.0,
        "dropped_replies": 0,
        "finished": True,
    }
    (run / "summary.json").write_text(json.dumps(summary))
    rounds = [{"round": n, "evaluation": {"train-accuracy": a}} for n, a in enumerate(curve, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    return run


def told(train, novel):
    """Both groups as a summary has them."""
    groups = {"train": train, "novel": novel}
    means = {
        role: {"accuracy": sum(values) / len(values), "clients": len(values)} if values else None
        for role, values in groups.items()
    }
    everyone = [(role, value) for role, values in groups.items() for value in values]
    return means | {
        "per_client": {
            str(i): {"role": role, "accuracy": value, "examples": 10 + i}
            for i, (role, value) in enumerate(everyone)
        }
    }
