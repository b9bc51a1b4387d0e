"""What a finished run's saved model shows: its predictions, and where it places the clients."""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict

import partitions
from clients.arrays import Arrays, from_record, group
from clients.base import Client
from fedapps.clientapp import app, make_client
from fedapps.engines.grid import InProcessGrid, simulated_node
from fedapps.files import read_arrays
from fedapps.methods import METHODS
from fedapps.node.bridge import load_state
from fedapps.node.building import with_public
from fedapps.results.folder import check_former
from fedapps.results.plot import matrix
from fedapps.serverapp import run
from fedapps.settings.config import Config, saved_configuration

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Watched(InProcessGrid):
    """Keeps what every node is sent to be evaluated with."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: dict[int, Arrays] = {}  # by node

    def _deliver(self, message: Message) -> Message:
        if message.metadata.message_type == "evaluate":
            self.sent[message.metadata.dst_node_id] = from_record(
                message.content.array_records["arrays"]
            )
        return super()._deliver(message)


def confusion(folder: Path) -> "Figure":
    """Of classes: true against predicted, over novel clients' samples (validation samples where
    nobody is novel). Of users with tastes: sub-population against head. Rows add up to 1."""
    from sklearn.metrics import confusion_matrix

    told = json.loads((folder / "summary.json").read_text("utf-8"))
    if users := [user for user in told["per_client"].values() if "head" in user]:
        kinds, heads = ([user[key] for user in users] for key in ("sub_population", "head"))
        shares = confusion_matrix(kinds, heads, normalize="true")
        return matrix(shares, "sub-population", "assigned head", folder.name)
    true, predicted = predictions(folder)
    shares = confusion_matrix(true, predicted, normalize="true")
    return matrix(shares, "true class", "predicted class", folder.name)


def predictions(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """True and predicted classes (samples,) by the saved model of a run, with what its clients
    keep. Raises ValueError where the run's folder lacks what predictions need."""
    config = saved_configuration(folder)
    method = str(config["method"])
    roles = partitions.federation(with_public(config, method)).novel
    novel = bool(METHODS[method].novel) and bool(roles.any())
    check_former(folder, method)
    with tempfile.TemporaryDirectory() as output:
        own: Config = {"rounds": 0, "from-dir": str(folder.resolve()), "output-dir": output}
        grid = Watched.simulation(app, config | own, int(config["num-clients"]))
        run(grid, config | own, "in-process")
    true, predicted = [], []
    for node, arrays in sorted(grid.sent.items()):
        one = make_client(grid.contexts[node], method)
        if one.share.novel != novel:
            continue
        one.state = load_state(grid.contexts[node], method, one)
        one.receive(arrays, {})
        samples = one.share.everything if novel else one.share.validation
        x, y = samples.to(one.device)[:]
        if len(y):
            true.append(y.cpu().numpy())
            predicted.append(one.predict(x).argmax(1).cpu().numpy())
    return np.concatenate(true), np.concatenate(predicted)


def embeddings(folder: Path, attribute: str = "") -> "Figure":
    """t-SNE of the clients' embeddings or descriptors, coloured by an attribute of theirs (such
    as ``coarse``), else marked by their classes."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    config = saved_configuration(folder)
    found = descriptors(config, read_arrays(folder))
    if len(found) < 4:
        raise ValueError(f"{folder.name} holds {len(found)} embeddings; a map needs at least 4")
    plane = TSNE(init="random", random_state=0, perplexity=min(30, (len(found) - 1) / 3))
    flat = plane.fit_transform(np.stack(list(found.values())))
    federation = partitions.federation(with_public(config, str(config["method"])))
    shares = [federation.share(client) for client in found]
    figure = Figure(figsize=(6, 5), layout="constrained")
    axis = figure.subplots()
    if attribute:
        names = [str(share.attributes[attribute]) for share in shares]
        kinds = {name: i for i, name in enumerate(sorted(set(names)))}
        for name, kind in kinds.items():
            mine = flat[[other == name for other in names]]
            axis.scatter(*mine.T, color=colormaps["tab20"](kind % 20), label=name)
        axis.legend(title=attribute, fontsize=7)
    else:
        for (x, y), row, share in zip(flat, label_shares(config)[list(found)], shares, strict=True):
            text = ",".join(map(str, np.flatnonzero(row)[:5]))
            style: dict[str, Any] = {"color": "#D55E00", "weight": "bold"} if share.novel else {}
            axis.text(x, y, text, ha="center", fontsize=7, **style)
        axis.set(xlim=(flat[:, 0].min(), flat[:, 0].max()))
        axis.set(ylim=(flat[:, 1].min(), flat[:, 1].max()))
        axis.set_title("classes of training clients, and of novel ones (bold)")
    axis.set(xticks=[], yticks=[])
    return figure


def descriptors(config: Config, arrays: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """v_i, or with an encoder e_i, by client; the latter of novel clients as well."""
    if encoder := group(arrays, "encoder"):
        clients: list[Any] = [client(config, i) for i in range(int(config["num-clients"]))]
        return {c.client: c.encode(encoder, {})[0]["descriptor"] for c in clients}
    return {int(name): v for name, v in sorted(group(arrays, "embedding").items())}


def label_shares(config: Config) -> np.ndarray:
    """Empirical label distributions (clients, C)."""
    federation = partitions.federation(with_public(config, str(config["method"])))
    shares = [federation.share(i).everything for i in range(federation.num_clients)]
    classes = federation.info.num_classes
    counts = [torch.bincount(s.y[s.index], minlength=classes).numpy() for s in shares]
    return np.array([count / count.sum() for count in counts])


def client(config: Config, number: int) -> Client:
    """The run's client of this number."""
    node = dict(simulated_node(number, int(config["num-clients"])))
    return make_client(Context(0, 0, node, RecordDict(), config), str(config["method"]))
