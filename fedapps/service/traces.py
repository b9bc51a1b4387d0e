"""FedTTA's Figure 2: what happens to a novel client as its model adapts step by step.

Accuracy, ℓ_per and prediction entropy against the step, for one novel client or the mean of all."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Context, RecordDict

import partitions
from clients.adaptation import Adapting
from clients.protocol import LR_FACTOR, lr_factor
from fedapps.clientapp import make_client
from fedapps.engines.grid import simulated_node
from fedapps.files import best_round, read_arrays
from fedapps.methods import METHODS
from fedapps.settings.config import Config, saved_configuration, settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = ("accuracy", "ℓ_per", "entropy")


@dataclass(frozen=True)
class Trace:
    """Accuracy, ℓ_per and entropy (nats) of one client before and after each step, (E + 1,)."""

    client: int
    accuracy: np.ndarray
    personalization: np.ndarray
    entropy: np.ndarray


def trace(
    config: Config, arrays: dict[str, np.ndarray], client: int, steps: int, round_: int = 1
) -> Trace:
    """`steps` adaptation steps of novel client `client` from the server's `arrays` of a round.

    Raises ValueError if the method does not adapt by FedTTA's steps."""
    method = str(config["method"])
    if not issubclass(METHODS[method].client, Adapting) or METHODS[method].client.personal:
        able = ", ".join(
            name
            for name, entry in METHODS.items()
            if issubclass(entry.client, Adapting) and not entry.client.personal
        )
        raise ValueError(f"{method!r} has no adaptation steps to trace; known: {able}")
    node = dict(simulated_node(client, int(config["num-clients"])))
    one = make_client(Context(0, 0, node, RecordDict(), config), method)
    assert isinstance(one, Adapting)
    told = settings(config, method)
    factor = lr_factor(told["lr_decay"], told["lr_decay_rounds"], round_)
    one.begin("evaluate", {LR_FACTOR: factor})
    one.load(arrays)
    x, y = one.share.everything.to(one.device)[:]
    rows = [
        (float((step.logits.argmax(1) == y).float().mean()), step.personalization, step.entropy)
        for step in one.steps(x, steps)
    ]
    return Trace(client, *np.array(rows).T)


def traces(folder: Path, client: int | None, steps: int) -> list[Trace]:
    """Traces of one novel client of a run's folder, or of all of them."""
    config = saved_configuration(folder)
    novel = np.flatnonzero(partitions.federation(config).novel).tolist()
    if client is not None and client not in novel:
        raise ValueError(f"client {client} is not novel; novel are {novel}")
    arrays = read_arrays(folder)
    who = novel if client is None else [client]
    return [trace(config, arrays, i, steps, best_round(folder)) for i in who]


def draw(found: list[Trace]) -> "Figure":
    """Three panels beside each other; the mean over clients, and the step of least entropy."""
    from matplotlib.figure import Figure

    stacked = [
        np.stack([getattr(t, name) for t in found])
        for name in ("accuracy", "personalization", "entropy")
    ]
    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.subplots(1, 3)
    least = int(stacked[2].mean(0)[1:].argmin()) + 1
    for axis, values, label in zip(axes, stacked, PANELS, strict=True):
        axis.plot(values.mean(0), color="black")
        axis.axvline(least, linestyle=":", color="grey")
        axis.set(xlabel="adaptation step", ylabel=label)
    who = f"client {found[0].client}" if len(found) == 1 else f"mean of {len(found)} novel clients"
    figure.suptitle(f"{who}; dotted: least entropy")
    return figure


def told(found: list[Trace]) -> Iterator[str]:
    """The means over clients at a few steps."""
    last = len(found[0].accuracy) - 1
    for step in sorted({0, 1, 2, 3, 5, 10, 20, last} & set(range(last + 1))):
        columns = zip(
            *((t.accuracy[step], t.personalization[step], t.entropy[step]) for t in found),
            strict=True,
        )
        means = [f"{name} {np.mean(c):.4f}" for name, c in zip(PANELS, columns, strict=True)]
        yield f"step {step:3d}  {'  '.join(means)}"
