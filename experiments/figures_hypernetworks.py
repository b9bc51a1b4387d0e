"""pFedHN's and ODPFL-HN's figures: ``python -m experiments.figures_hypernetworks …``.

RUN is the folder of one method's finished run.

- pFedHN's Figure 3: ``mix OUT [EXPERIMENT] key=value …``, which trains in process and reads the
  clients' states
- pFedHN's Figures 2 and 7: ``gap OUT RUN …`` and ``scatter OUT RUN …``
- ODPFL-HN's Figure 3: ``shift OUT RUN …`` and ``corruption OUT RUN …``
- ODPFL-HN's Figures 4 and 5: ``privacy OUT RUN``, which evaluates saved models again

``fedapps plot RUN embeddings`` draws maps of embeddings."""

import logging
import tempfile
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer
from flwr.app import Message
from matplotlib import pyplot as plt
from scipy import stats

import partitions
from clients.core.arrays import Arrays, from_record
from clients.core.client import Client
from fedapps.building import with_public
from fedapps.clientapp import app, make_client
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.results.schema import with_present_names
from fedapps.saved import read_json
from fedapps.serverapp import run, run_in_process
from fedapps.settings.config import Config, defaults, override
from fedapps.settings.experiments import read_arguments
from fedapps.settings.saved_configurations import run_configuration
from partitions import inspect

matplotlib.use("Agg")
cli = typer.Typer(help="Hypernetworks' figures.", no_args_is_help=True, add_completion=False)
TOTAL_VARIATION, DIVERGENCE = 0, 1  # of what `inspect.distances` returns
Keys = Annotated[list[str] | None, typer.Argument(help="TOML file, key=value")]


@cli.command()
def mix(out: Path, arguments: Keys = None) -> None:
    """Accuracy of each client's classifier on every client's feature extractor, by row."""
    config = override(defaults(), {"method": "pfedhn-pc", "train-fraction": 1.0})
    changes = read_arguments(arguments or [], main=False).settings
    matrix = mix_and_match(override(config, changes))
    low, high = matrix.min(1, keepdims=True), matrix.max(1, keepdims=True)
    figure, axis = plt.subplots(figsize=(5, 4))
    image = axis.imshow((matrix - low) / np.maximum(high - low, 1e-9), cmap="viridis")
    axis.set(xlabel="feature extractor of client", ylabel="classifier and data of client")
    figure.colorbar(image, label="accuracy, normalised by row")
    save(figure, out)


@cli.command()
def gap(out: Path, runs: list[Path]) -> None:
    """The accuracy gap between novel and training clients against the mean total variation distance
    of a novel client to the nearest training client; one line per method, one run per point."""
    points: dict[str, list[tuple[float, float]]] = {}
    for folder in runs:
        scores = with_present_names(read_json(folder / "summary.json"))["evaluation"]
        ((method, clients),) = by_distance([folder], TOTAL_VARIATION).items()
        difference = scores["novel-accuracy"] - scores["train-accuracy"]
        distance = float(np.mean([far for far, _ in clients]))
        points.setdefault(method, []).append((distance, 100 * difference))
    figure, axis = plt.subplots(figsize=(5, 4))
    for method, values in points.items():
        axis.plot(*np.array(sorted(values)).T, marker="o", label=method)
    axis.set(xlabel="total variation distance", ylabel="accuracy gap in points")
    axis.legend()
    save(figure, out)


@cli.command()
def scatter(out: Path, runs: list[Path]) -> None:
    """Accuracy of every novel client against its total variation distance to the nearest training
    client, a dot each (pFedHN's Figure 7); one colour per method."""
    figure, axis = plt.subplots(figsize=(5, 4))
    for method, values in by_distance(runs, TOTAL_VARIATION).items():
        axis.plot(*np.array(values).T, ".", label=method)
    axis.set(xlabel="total variation distance", ylabel="accuracy in %")
    axis.legend()
    save(figure, out)


@cli.command()
def shift(out: Path, runs: list[Path], bins: int = 6) -> None:
    """Accuracy of novel clients against the KL divergence to the nearest training client, the
    mean ± standard error of equally many clients a point; one line per method."""
    figure, axis = plt.subplots(figsize=(5, 4))
    for method, values in by_distance(runs, DIVERGENCE).items():
        parts = np.array_split(np.array(sorted(values)), min(bins, max(1, len(values) // 2)))
        x, y = np.array([part.mean(0) for part in parts]).T
        axis.errorbar(x, y, [stats.sem(part[:, 1]) for part in parts], marker="o", label=method)
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
            config = run_configuration(folder)
            base = {"partition.base-rule": config["partition"], "partition": "corrupted"}
            x = [float(value) for value in values.split(",")]
            y = []
            error = []
            for value in x:
                scores = later(folder, **base, **{f"partition.{kind}": value})["evaluation"]
                y.append(100 * scores["novel-accuracy"])
                error.append(100 * scores["novel-sem"])
                print(f"{folder.name}, {kind} {value:g}: {y[-1]:.2f} %", flush=True)
            axis.errorbar(x, y, error, marker="o", label=str(config["method"]))
        axis.set(xlabel=f"{kind}, {label}")
    axes[0].set(ylabel="accuracy in %")
    axes[0].legend()
    save(figure, out)


@cli.command()
def privacy(
    out: Path,
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    counts: str = "10,30,100,300,700",
    epsilons: str = "0.1,0.3,1,0",
    delta: float = 0.01,
) -> None:
    """Accuracy of novel clients against the samples behind their descriptor, by ε (0: none)."""
    figure, axis = plt.subplots(figsize=(5, 4))
    for epsilon in map(float, epsilons.split(",")):
        points = []
        for count in map(int, counts.split(",")):
            changes = {
                "odpfl-hn.encode-samples": count,
                "odpfl-hn.descriptor-epsilon": epsilon,
                "odpfl-hn.descriptor-delta": delta,
            }
            scores = later(folder, **changes)["evaluation"]
            points.append((count, 100 * scores["novel-accuracy"], 100 * scores["novel-sem"]))
            print(f"ε {epsilon or np.inf}: {count} samples, {points[-1][1]:.2f} %")
        x, y, error = zip(*points, strict=True)
        axis.errorbar(x, y, error, marker="o", label=f"ε = {epsilon}" if epsilon else "not private")
    axis.set(xlabel="samples", ylabel="accuracy of novel clients in %", xscale="log")
    axis.legend()
    save(figure, out)


def by_distance(runs: list[Path], kind: int) -> dict[str, list[tuple[float, float]]]:
    """By method: each novel client's distance to the nearest training client's labels, and its
    accuracy in %."""
    points: dict[str, list[tuple[float, float]]] = {}
    for folder in runs:
        summary = read_json(folder / "summary.json")
        config = run_configuration(folder)
        federation = partitions.federation(with_public(config, str(config["method"])))
        distances = inspect.distances(inspect.class_counts(federation), federation.novel)[kind]
        for client, far in zip(np.flatnonzero(federation.novel), distances, strict=True):
            accuracy = summary["per_client"][str(client)]["accuracy"]
            points.setdefault(str(config["method"]), []).append((float(far), 100 * accuracy))
    return points


class EvaluationGrid(InProcessGrid):
    """Keeps the arrays with which every node is evaluated, by node id."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: dict[int, Arrays] = {}

    def _deliver(self, message: Message) -> Message:
        if message.metadata.message_type == "evaluate":
            record = message.content.array_records["arrays"]
            self.sent[message.metadata.dst_node_id] = from_record(record)
        return super()._deliver(message)


def mix_and_match(config: Config) -> np.ndarray:
    """Validation accuracy (clients, clients): row i, ω_i on client i's data; column j, θ_j."""
    grid = EvaluationGrid.simulation(app, config, int(config["num-clients"]))
    run(grid, config, "in-process")
    rows = []
    for node in sorted(grid.sent):
        client = client_of(grid.contexts[node], "pfedhn-pc")
        accuracies = []
        for other in sorted(grid.sent):
            _, _, metrics = client.score(grid.sent[other], {})
            accuracies.append(metrics["accuracy"])
        rows.append(accuracies)
    return np.array(rows)


def client_of(context: Any, method: str) -> Client:
    """A simulated client with the state that it has kept, which only a simulation can read."""
    client = make_client(context, method)
    for record in context.state.array_records.values():
        client.state = from_record(record)
    return client


def later(folder: Path, **changes: Any) -> dict[str, Any]:
    """The summary of a run of no rounds from a saved model, with `changes`."""
    config = override(run_configuration(folder), changes)
    with tempfile.TemporaryDirectory() as output:
        own: Config = {"rounds": 0, "from-dir": str(folder.resolve()), "output-dir": output}
        run_in_process(config | own)
        return read_json(Path(output) / "summary.json")


def save(figure: Any, out: Path, dpi: int = 90) -> None:
    """Write the figure and close it."""
    figure.tight_layout()
    figure.savefig(out, dpi=dpi, pil_kwargs={"optimize": True})
    plt.close(figure)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    cli()
