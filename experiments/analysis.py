"""What the figures have in common: saved runs, simulated clients, distances between clients."""

import json
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from flwr.app import Message
from matplotlib import pyplot as plt

import partitions
from clients.arrays import Arrays, from_record
from clients.base import Client
from fedapps.clientapp import app, make_client
from fedapps.engines.grid import InProcessGrid
from fedapps.node.building import with_public
from fedapps.serverapp import run, run_in_process
from fedapps.service.figures import label_shares
from fedapps.settings.config import Config, defaults, override, parse_override
from fedapps.settings.experiments import read_experiment

matplotlib.use("Agg")


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
    sent, rows = grid.sent, []
    for node in sorted(sent):
        client = client_of(grid.contexts[node], "pfedhn-pc")
        rows.append([client.score(sent[other], {})[2]["accuracy"] for other in sorted(sent)])
    return np.array(rows)


def client_of(context: Any, method: str) -> Client:
    """A simulated client with the state that it has kept, which only a simulation can read."""
    client = make_client(context, method)
    for record in context.state.array_records.values():
        client.state = from_record(record)
    return client


def nearest(config: Config, distance: Callable[[np.ndarray, np.ndarray], float]) -> np.ndarray:
    """Each novel client's distance to the nearest training client, (novel,)."""
    federation = partitions.federation(with_public(config, str(config["method"])))
    p = label_shares(config)
    training = p[~federation.novel]
    return np.array([min(distance(q, t) for t in training) for q in p[federation.novel]])


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    """½ Σ |p − q|."""
    return float(np.abs(p - q).sum() / 2)


def kullback_leibler(p: np.ndarray, q: np.ndarray) -> float:
    """Σ p ln(p/q), in nats; classes missing from q count as 10⁻³ of its mass."""
    floor = np.maximum(q, 1e-3) / np.maximum(q, 1e-3).sum()
    return float(np.sum(p[p > 0] * np.log(p[p > 0] / floor[p > 0])))


def later(folder: Path, **changes: Any) -> dict[str, Any]:
    """The summary of a run of no rounds from a saved model, with `changes`."""
    config = override(configuration(folder), changes)
    with tempfile.TemporaryDirectory() as output:
        own: Config = {"rounds": 0, "from-dir": str(folder.resolve()), "output-dir": output}
        run_in_process(config | own)
        return read(Path(output))


def configuration(folder: Path) -> Config:
    """A run's configuration."""
    saved = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    return override(defaults(), {key: v for key, v in saved.items() if key != "versions"})


def configured(config: Config, arguments: list[str] | None) -> Config:
    """`config` with the keys of an experiment's file and of key=value arguments."""
    for argument in arguments or []:
        changes = read_experiment(argument).settings if argument.endswith(".toml") else None
        config = override(config, changes or dict([parse_override(argument)]))
    return config


def read(folder: Path) -> dict[str, Any]:
    """A run's summary."""
    return json.loads((folder / "summary.json").read_text("utf-8"))


def sem(values: np.ndarray) -> float:
    """Standard error of the mean; 0 of a single value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def save(figure: Any, out: Path, dpi: int = 90) -> None:
    """Write the figure and close it."""
    figure.tight_layout()
    figure.savefig(out, dpi=dpi, pil_kwargs={"optimize": True})
    plt.close(figure)
