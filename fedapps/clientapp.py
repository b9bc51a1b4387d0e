"""The Flower ClientApp: builds the method's client for the node at hand and lets it answer."""

import os
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import partitions
from clients.base import Client
from fedapps.engines.nodes import Host
from fedapps.methods import METHODS
from fedapps.node.bridge import answer, identity, is_simulated
from fedapps.node.building import build_client, with_public
from fedapps.node.ledger import guarded
from fedapps.service import node as service
from fedapps.settings.config import Config, check_method, completed
from partitions import trust
from partitions.base import novel_shots
from partitions.datasets import DATASETS, Info
from partitions.references import is_reference
from partitions.seeds import seed_of
from partitions.shares import Share

torch.set_num_threads(1)  # virtual clients share the machine; one process, one core


def make_client(context: Context, method: str) -> Client:
    """The method's client for this node.

    Its data: the node's own ``data-path`` if it has one, else its partition of the dataset.
    A real node imports what its own `allow` names, and reads no folder that a server names; the
    command that simulates clients has checked their configuration. Raises ValueError if it has no
    data, and if the federation's size is not num-clients."""
    node = context.node_config
    if not (simulation := is_simulated(context)):
        trust.allow(*trust.named(str(node.get("allow", ""))))
    config = completed(context.run_config, trusted=simulation)
    check_method(method)
    if not simulation:
        config["data-dir"] = str(node.get("data-dir", ""))
        if "data-path" not in node or METHODS[method].client.needs_public:
            check_own_folder(config)
    client_id = identity(context)
    if (card := service.card_of(context)) is not None:
        share = service.inputs_of(context, card).share
        info, client_id = card.info(), service.CLIENT if share.novel else client_id
        if share.novel and "descriptor-epsilon" in node:  # the privacy that it wants for itself
            config[f"{method}.descriptor-epsilon"] = float(node["descriptor-epsilon"])
    elif "data-path" in node:
        share, info = _load_share(str(node["data-path"]))
        seed = seed_of(int(config["seed"]), "shots", client_id)
        share = share.with_shots(novel_shots(config), seed)
    else:
        count, expected = node.get("num-partitions"), config["num-clients"]
        if count != expected:
            raise ValueError(
                f"the federation has {count} clients, but num-clients is {expected}"
                if count
                else "the node's configuration names neither its data (data-path) nor its number "
                "(partition-id and num-partitions)"
            )
        federation = partitions.federation(with_public(config, method))
        share, info = federation.share(client_id), federation.info
    return build_client(config, method, share, info, client_id, str(node.get("model", "")))


def check_own_folder(config: Config) -> None:
    """Raise ValueError for data at a path, unless it is below this machine's folder of data."""
    root = str(config["data-dir"]) or os.environ.get("FEDAPPS_DATA_DIR", "")
    for key in ("dataset", "partition.novel-dataset"):
        name = str(config[key])
        if not name or name in DATASETS or is_reference(name):
            continue
        if not root or not (Path(root) / name).resolve().is_relative_to(Path(root).resolve()):
            raise ValueError(
                f"{key} is {name!r}; a node reads such data from the data-path of its node "
                "configuration, or below the data-dir there"
            )


@lru_cache(maxsize=8)
def _load_share(path: str) -> tuple[Share, Info]:
    return Share.load(path)


class App(ClientApp):
    """Answers its methods' exchanges, also those of a method from outside the package, which
    are not known before a message comes."""

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply; the bridge refuses what is no exchange of the method at hand."""
        category, _, action = message.metadata.message_type.partition(".")
        if action and message.metadata.message_type not in self._registered_funcs:
            getattr(self, category)(action, mods=[guarded])(_answer)
        return super().__call__(message, context)


def _answer(message: Message, context: Context) -> Message:
    return answer(message, context, make_client)


def _answer_simulated(message: Message, context: Context) -> Message:
    """A virtual client tells what it keeps, and gets it back; a real node's state stays on it."""
    if not is_simulated(context):
        raise PermissionError("what a real node keeps stays on it")
    return _answer(message, context)


app = App()
app.query(mods=[guarded])(_answer)
app.train(mods=[guarded])(_answer)
app.evaluate(mods=[guarded])(_answer)
app.query("wants")(service.wants)
app.query("serve")(lambda message, context: service.serve(message, context, make_client))
app.query("keep")(_answer_simulated)
app.train("recall")(_answer_simulated)
host = Host(app)  # answers for all clients of a node
