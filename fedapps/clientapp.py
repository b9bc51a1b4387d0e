"""The Flower ClientApp: builds the method's client for the node at hand and lets it answer."""

import os
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn

import partitions
from clients.arrays import Arrays, model_arrays
from clients.base import Client
from clients.cohort import in_cohort
from clients.models import build_model, sized
from clients.models.roles import check_tied
from fedapps.bridge import answer, identity, is_simulated
from fedapps.config import Config, check_method, completed, construct, settings
from fedapps.engines.nodes import Host
from fedapps.ledger import guarded
from fedapps.methods import METHODS, Method
from fedapps.service import node as service
from partitions import trust
from partitions.base import DEFAULT_PUBLIC, novel_shots
from partitions.datasets import DATASETS, Info
from partitions.references import is_reference, options
from partitions.seeds import drawing, seed_of
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


def build_client(
    config: Config, method: str, share: Share, info: Info, client_id: int, own: str = ""
) -> Client:
    """The method's client that holds the share; `own` names its network if it has one."""
    if share.public is None and METHODS[method].client.needs_public:
        share = replace(share, public=partitions.federation(with_public(config, method)).public)
    config = config | {"model": client_model(config, method, client_id, own)}
    model, initial = method_model(method, config, info)
    if in_cohort():  # the others' steps are still to come
        model = deepcopy(model)
    return construct(
        METHODS[method].client,
        model,
        share,
        config=config,
        method=method,
        client=client_id,
        initial=initial,
        model_name=str(config["model"]),
    )


def with_public(config: Config, method: str) -> Config:
    """The configuration whose federation keeps public samples if the method needs some."""
    key = "partition.public-samples"
    return config | {
        key: config[key] or (DEFAULT_PUBLIC if METHODS[method].client.needs_public else 0)
    }


def client_model(config: Config, method: str, client: int, own: str = "") -> str:
    """The network of a client: its node's `own`, else the one that client-models deals it.

    Raises ValueError if all clients of the method must have the same, unless the run is that of
    one model's clients (only-model)."""
    dealt = client_models(config)
    if not own and not dealt:
        return str(config["model"])
    if not config["only-model"] and not _any_model(METHODS[method]):
        able = ", ".join(name for name, m in METHODS.items() if _any_model(m))
        raise ValueError(f"{method!r} needs one model for all clients; their own have: {able}")
    return sized(str(config["model"]), own) if own else dealt[client % len(dealt)]


def client_models(config: Config) -> list[str]:
    """The names of the networks that client-models deals."""
    words = str(config["client-models"]).split(",")
    return [sized(str(config["model"]), word.strip()) for word in words if word.strip()]


def _any_model(method: Method) -> bool:
    """Whether its clients' networks may differ: the strategy serves all, or they stay there."""
    return method.strategy.any_model or method.client.personal == ("",)


@lru_cache(maxsize=8)
def _load_share(path: str) -> tuple[Share, Info]:
    return Share.load(path)


def method_model(method: str, config: Config, info: Info) -> tuple[nn.Module, Arrays]:
    """The method's whole network and its initial arrays, which the seed alone decides.

    A process keeps one network per configuration: every call of a client sets all its arrays."""
    known = settings(config, method)
    own = options(config, str(known["model"]))
    return _method_model(method, tuple(sorted(known.items())), tuple(sorted(own.items())), info)


@lru_cache(maxsize=8)
def _method_model(
    method: str,
    settings: tuple[tuple[str, object], ...],
    own: tuple[tuple[str, object], ...],
    info: Info,
) -> tuple[nn.Module, Arrays]:
    known = dict(settings)
    seed = int(str(known["seed"]))
    base = build_model(str(known["model"]), info.shape, info.num_classes, seed, **dict(own))
    with drawing(seed):
        client = METHODS[method].client
        model = check_tied(client.build_network(base, info, **known), client.is_separate, method)
    return model, model_arrays(model)


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
