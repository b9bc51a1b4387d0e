"""What pFedHN's and ODPFL-HN's figures show, from the folders of finished runs."""

import json
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict

import partitions
from clients.arrays import from_record, group
from fedapps.client_app import app, make_client, with_public
from fedapps.config import Config, defaults, override
from fedapps.engines.grid import InProcessGrid
from fedapps.engines.jobs import run_in_process
from fedapps.server_app import run


def descriptors(config: Config, arrays: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """v_i, or with an encoder e_i, by client; the latter of novel clients as well."""
    if encoder := group(arrays, "encoder"):
        clients = [client(config, i) for i in range(int(config["num-clients"]))]
        return {c.client: c.encode(encoder, {})[0]["descriptor"] for c in clients}
    return {int(name): v for name, v in sorted(group(arrays, "embedding").items())}


def mix_and_match(config: Config) -> np.ndarray:
    """Validation accuracy (clients, clients): row i, ω_i on client i's data; column j, θ_j."""
    grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
    sent: dict[int, dict[str, np.ndarray]] = {}

    class Watched(InProcessGrid):
        def _deliver(self, message):
            if message.metadata.message_type == "evaluate":
                sent[message.metadata.dst_node_id] = from_record(message.content["arrays"])
            return super()._deliver(message)

    grid.__class__ = Watched
    run(grid, config, "in-process")
    rows = []
    for node in sorted(sent):
        one = make_client(grid.contexts[node], "pfedhn-pc")
        for record in grid.contexts[node].state.array_records.values():
            one.state = from_record(record)
        rows.append([one.score(sent[other], {})[2]["accuracy"] for other in sorted(sent)])
    return np.array(rows)


def label_shares(config: Config) -> np.ndarray:
    """Empirical label distributions (clients, C)."""
    federation = partitions.federation(with_public(config, str(config["method"])))
    shares = [federation.share(i).everything for i in range(federation.num_clients)]
    classes = federation.info.num_classes
    counts = [np.bincount(s.y[s.index].numpy(), minlength=classes) for s in shares]
    return np.array([count / count.sum() for count in counts])


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
    found = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    return override(defaults(), {key: v for key, v in found.items() if key != "versions"})


def client(config: Config, number: int) -> Any:
    """The run's client of this number."""
    node = {"partition-id": number, "num-partitions": config["num-clients"]}
    return make_client(Context(0, 0, node, RecordDict(), config), str(config["method"]))


def read(folder: Path) -> dict[str, Any]:
    """A run's summary."""
    return json.loads((folder / "summary.json").read_text("utf-8"))


def sem(values: np.ndarray) -> float:
    """Standard error of the mean; 0 of a single value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
