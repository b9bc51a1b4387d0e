"""pFedHN's and ODPFL-HN's figures: ``python -m experiments.figures_hypernetworks …``.

RUN is the folder of one method's finished run. ``mix OUT [EXPERIMENT] key=value …`` (pFedHN's
Figure 3; trains in process and looks into the clients' states, as only a simulation's experimenter
may), ``gap OUT RUN …`` and ``scatter OUT RUN …`` (pFedHN's Figures 2 and 7), ``shift OUT RUN …``,
``corruption OUT RUN …`` (ODPFL-HN's Figure 3) and ``privacy OUT RUN`` (its Figures 4 and 5), which
evaluate saved models anew. Maps of embeddings are ``fedapps plot RUN embeddings``."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer
from matplotlib import pyplot as plt

import partitions
from experiments.analysis import (
    configuration,
    kullback_leibler,
    later,
    mix_and_match,
    nearest,
    read,
    sem,
    total_variation,
)
from fedapps.node.building import with_public
from fedapps.settings.config import Config, defaults, override, parse_override
from fedapps.settings.experiments import read_experiment

matplotlib.use("Agg")
cli = typer.Typer(help="Hypernetworks' figures.", no_args_is_help=True, add_completion=False)
Distance = Callable[[np.ndarray, np.ndarray], float]  # of two label distributions
Keys = Annotated[list[str] | None, typer.Argument(help="TOML file, key=value")]


@cli.command()
def mix(out: Path, arguments: Keys = None) -> None:
    """Accuracy of each client's classifier on every client's feature extractor, by row."""
    config = override(defaults(), {"method": "pfedhn-pc", "train-fraction": 1.0})
    matrix = mix_and_match(configured(config, arguments))
    low, high = matrix.min(1, keepdims=True), matrix.max(1, keepdims=True)
    figure, axis = plt.subplots(figsize=(5, 4))
    image = axis.imshow((matrix - low) / np.maximum(high - low, 1e-9), cmap="viridis")
    axis.set(xlabel="feature extractor of client", ylabel="classifier and data of client")
    figure.colorbar(image, label="accuracy, normalised by row")
    save(figure, out)


@cli.command()
def gap(out: Path, runs: list[Path]) -> None:
    """Accuracy of novel less that of training clients against the mean total variation distance
    of a novel client to the nearest training client; one line per method, one run per point."""
    points: dict[str, list[tuple[float, float]]] = {}
    for folder in runs:
        summary, config = read(folder), configuration(folder)
        distance = nearest(config, total_variation).mean()
        difference = summary["novel"]["accuracy"] - summary["train"]["accuracy"]
        points.setdefault(str(config["method"]), []).append((distance, 100 * difference))
    figure, axis = plt.subplots(figsize=(5, 4))
    for method, found in points.items():
        axis.plot(*np.array(sorted(found)).T, marker="o", label=method)
    axis.set(xlabel="total variation distance", ylabel="accuracy gap in points")
    axis.legend()
    save(figure, out)


@cli.command()
def scatter(out: Path, runs: list[Path]) -> None:
    """Accuracy of every novel client against its total variation distance to the nearest training
    client, a dot each (pFedHN's Figure 7); one colour per method."""
    figure, axis = plt.subplots(figsize=(5, 4))
    for method, found in by_distance(runs, total_variation).items():
        axis.plot(*np.array(found).T, ".", label=method)
    axis.set(xlabel="total variation distance", ylabel="accuracy in %")
    axis.legend()
    save(figure, out)


@cli.command()
def shift(out: Path, runs: list[Path], bins: int = 6) -> None:
    """Accuracy of novel clients against the KL divergence to the nearest training client, the
    mean ± standard error of equally many clients a point; one line per method."""
    figure, axis = plt.subplots(figsize=(5, 4))
    for method, found in by_distance(runs, kullback_leibler).items():
        parts = np.array_split(np.array(sorted(found)), min(bins, len(found)))
        x, y = np.array([part.mean(0) for part in parts]).T
        axis.errorbar(x, y, [sem(part[:, 1]) for part in parts], marker="o", label=method)
    axis.set(xlabel="KL divergence to the nearest training client", ylabel="accuracy in %")
    axis.legend()
    save(figure, out)


@cli.command()
def corruption(
    out: Path, runs: list[Path], blurs: str = "0,0.5,1,1.5,2", angles: str = "0,15,30,45,60"
) -> None:
    """Accuracy of novel clients whose inputs are blurred or rotated, by saved models."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    sides = ("blur", blurs, "deviation in pixels"), ("rotation", angles, "degrees")
    for axis, (kind, values, label) in zip(axes, sides, strict=True):
        for folder in runs:
            base = {"partition.base": configuration(folder)["partition"], "partition": "corrupted"}
            told = [
                later(folder, **base, **{f"partition.{kind}": float(value)})["novel"]
                for value in values.split(",")
            ]
            y, error = zip(*((100 * t["accuracy"], 100 * t["sem"]) for t in told), strict=True)
            method = str(configuration(folder)["method"])
            axis.errorbar([*map(float, values.split(","))], y, error, marker="o", label=method)
        axis.set(xlabel=f"{kind}, {label}")
    axes[0].set(ylabel="accuracy in %")
    axes[0].legend()
    save(figure, out)


@cli.command()
def privacy(
    out: Path,
    run: Path,
    counts: str = "10,30,100,300,700",
    epsilons: str = "0.1,0.3,1,0",
    delta: float = 0.01,
) -> None:
    """Accuracy of novel clients against the samples behind their descriptor, by ε (0: none)."""
    figure, axis = plt.subplots(figsize=(5, 4))
    for epsilon in map(float, epsilons.split(",")):
        points = []
        for count in map(int, counts.split(",")):
            private = {"descriptor-epsilon": epsilon, "descriptor-delta": delta}
            keys = {"encode-samples": count} | private
            told = later(run, **{f"odpfl-hn.{key}": value for key, value in keys.items()})["novel"]
            points.append((count, 100 * told["accuracy"], 100 * told["sem"]))
            print(f"ε {epsilon or np.inf}: {count} samples, {points[-1][1]:.2f} %")
        x, y, error = zip(*points, strict=True)
        axis.errorbar(x, y, error, marker="o", label=f"ε = {epsilon}" if epsilon else "not private")
    axis.set(xlabel="samples", ylabel="accuracy of novel clients in %", xscale="log")
    axis.legend()
    save(figure, out)


def by_distance(runs: list[Path], distance: Distance) -> dict[str, list[tuple[float, float]]]:
    """Of each method's novel clients, the distance to the nearest training client's labels, and
    the accuracy in %."""
    points: dict[str, list[tuple[float, float]]] = {}
    for folder in runs:
        summary, config = read(folder), configuration(folder)
        distances = nearest(config, distance)
        federation = partitions.federation(with_public(config, str(config["method"])))
        for client, far in zip(np.flatnonzero(federation.novel), distances, strict=True):
            accuracy = summary["per_client"][str(client)]["accuracy"]
            points.setdefault(str(config["method"]), []).append((float(far), 100 * accuracy))
    return points


def configured(config: Config, arguments: list[str] | None) -> Config:
    """`config` with the keys of an experiment's file and of key=value arguments."""
    for argument in arguments or []:
        changes = read_experiment(argument).settings if argument.endswith(".toml") else None
        config = override(config, changes or dict([parse_override(argument)]))
    return config


def save(figure: Any, out: Path) -> None:
    """Write the figure and close it."""
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    cli()
