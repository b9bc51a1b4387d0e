"""What a method computes, in a few numbers: those of a small run with a measurement's settings.

A record of measurements keeps them beside its values. If the same small run gives other numbers
later, the method computes something else, and the values are stale. A rewrite of its code that
computes the same leaves them. Numbers are compared up to rounding, which differs between
processors.

The small run has six clients with a hundred of the digits each, and two rounds. It has the method's
settings, and not those of the data. So it says nothing of datasets, partition rules and what needs
more rounds."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedapps.settings.config import Config, defaults, effective, override, relevant, section_of

SIZE: Config = {
    "dataset": "digits",
    "num-clients": 6,
    "train-fraction": 0.5,
    "fraction-train": 1.0,
    "rounds": 2,
    "evaluate-every": 1,
    "seed": 0,
    "partition.public-samples": 1200,  # all but a hundred for each client
}
PUBLIC_SAMPLES = 60  # of a method that learns from public samples
LARGEST = {  # of settings that decide how long the small run takes
    "local-steps": 3,
    "local-epochs": 1,
    "fine-tune-rounds": 1,
    "fedavg-rounds": 1,
    "novel-rounds": 1,
    "embedding-dim": 8,  # an embedding must fit the digits' images
    "som-passes": 5,
}
# Three training clients certify no smaller share; of 85 samples they hold out more than 20.
FEW_CLIENTS = {"auto": {"auto.alpha": 0.5, "auto.plays": 2, "auto.held-out": 0.4}}
# Where and how a run is carried out, and settings of the data.
LEFT_OUT = {
    *SIZE, "partition", "data-dir", "data-seed", "output-dir", "from-dir", "training-dir", "resume",
    "checkpoint-every", "callbacks", "device", "stacked-clients", "early-stopping",
    "round-timeout", "start-timeout", "scores", "selection-mean", "average-over",
}  # fmt: skip
LOSSES = ("train-loss", "novel-loss")
TOLERANCE = 1e-4  # relative
DIGITS = 8  # significant ones in a record
Settings = Mapping[str, Any]
Numbers = dict[str, float]


def settings_of(config: Config) -> dict[str, Any]:
    """The settings of the small run for a run's configuration, without the defaults."""
    base = defaults()
    method = str(config["method"])
    settings: dict[str, Any] = {"method": method}
    for key, value in relevant(config).items():
        is_of_method = key not in LEFT_OUT and section_of(key) != "partition"
        if is_of_method and key in base and value != base[key]:
            settings[key] = value
    for name, largest in LARGEST.items():
        of_run = effective(config, name)
        if isinstance(of_run, int) and of_run > largest:
            settings[_key(config, name)] = largest
    settings |= FEW_CLIENTS.get(method, {})
    if config["partition"] == "preference":
        settings["partition"] = "preference"
    if settings.get("standardize") == "channels":
        settings["standardize"] = "training-clients"  # the digits have no customary constants
    if "dp-generator" in base and (config["dp"] != "none" or _is_private(config)):
        settings[_key(config, "dp-generator")] = "seeded"
    if not _takes_digits(str(effective(config, "model"))):
        settings[_key(config, "model")] = "mlp"
    return settings


def _key(config: Config, name: str) -> str:
    """The key under which the run's method reads a setting."""
    of_method = f"{config['method']}.{name}"
    return of_method if of_method in config else name


def _is_private(config: Config) -> bool:
    """Whether novel clients send private descriptors."""
    return bool(effective(config, "descriptor-epsilon"))


def _takes_digits(model: str) -> bool:
    """Whether the network takes images of 8 × 8 pixels."""
    from clients.models import build_model

    try:
        build_model(model, (1, 8, 8), 10, 0)
    except (ValueError, RuntimeError):
        return False
    return True


def fingerprint(settings: Settings) -> Numbers:
    """The numbers of the small run: sums over the entries of the server's last arrays, and the
    losses of training and novel clients in each round.

    Raises ValueError if a setting is not known any more."""
    from clients.core.arrays import from_record
    from fedapps.clientapp import app
    from fedapps.engines.in_process_grid import InProcessGrid
    from fedapps.methods import METHODS
    from fedapps.serverapp import run

    size = dict(SIZE)
    if METHODS[str(settings["method"])].client.needs_public:
        size["partition.public-samples"] = PUBLIC_SAMPLES
    config = override(defaults(), size | dict(settings), all_methods=False)
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.ERROR)
    try:
        grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
        result = run(grid, config, "in-process")
    finally:
        flower.setLevel(level)
    numbers = {"positive": 0.0, "negative": 0.0, "squares": 0.0}
    for array in from_record(result.arrays).values():
        x = np.asarray(array, np.float64)
        numbers["positive"] += float(x[x > 0].sum())
        numbers["negative"] -= float(x[x < 0].sum())
        numbers["squares"] += float((x**2).sum())
    for round_, metrics in result.evaluate_metrics_clientapp.items():
        for name in LOSSES:
            loss = metrics.get(name)
            if isinstance(loss, float):
                numbers[f"{name}, round {round_}"] = loss
    return {name: float(f"{number:.{DIGITS}g}") for name, number in numbers.items()}


def agree(one: Numbers, other: Numbers) -> bool:
    """Whether the numbers are the same up to rounding."""
    if one.keys() != other.keys():
        return False
    return all(
        math.isclose(one[name], other[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE**2)
        for name in one
    )
