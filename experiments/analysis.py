"""What the figures have in common: saved runs and simulated clients."""

import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from flwr.app import Message
from matplotlib import pyplot as plt

from clients.arrays import Arrays, from_record
from clients.base import Client
from fedapps.clientapp import app, make_client
from fedapps.engines.grid import InProcessGrid
from fedapps.serverapp import run, run_in_process
from fedapps.settings.config import Config, override, run_configuration

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


def later(folder: Path, **changes: Any) -> dict[str, Any]:
    """The summary of a run of no rounds from a saved model, with `changes`."""
    config = override(run_configuration(folder), changes)
    with tempfile.TemporaryDirectory() as output:
        own: Config = {"rounds": 0, "from-dir": str(folder.resolve()), "output-dir": output}
        run_in_process(config | own)
        return read(Path(output))


def read(folder: Path) -> dict[str, Any]:
    """A run's summary."""
    return json.loads((folder / "summary.json").read_text("utf-8"))


def save(figure: Any, out: Path, dpi: int = 90) -> None:
    """Write the figure and close it."""
    figure.tight_layout()
    figure.savefig(out, dpi=dpi, pil_kwargs={"optimize": True})
    plt.close(figure)
