"""The Flower ClientApp: builds the method's client for a node and lets it answer."""

import hashlib
from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

import partitions
from clients.core.client import Client
from clients.core.protocol import SCALING, SERVE, WANTS
from fedapps.building import WITHOUT_SCORES, Builder, with_public
from fedapps.common import external_code
from fedapps.common.external_code import is_reference
from fedapps.common.seeds import seed_of
from fedapps.common.threads import one_thread
from fedapps.common.torch_defaults import torch_defaults
from fedapps.engines.hosting import HostingApp
from fedapps.engines.in_process_grid import simulated_node
from fedapps.methods import METHODS
from fedapps.node.bridge import opening_error, register, reply_of
from fedapps.node.context import identity, is_simulated, method_of
from fedapps.node.ledger import agreed_terms, protected
from fedapps.service import served_node as service
from fedapps.service.stream import CLIENT
from fedapps.settings.config import Config, check_method, completed, defaults, is_resolved, said
from fedapps.settings.rates import with_rate_of_task
from partitions.cache import fingerprint
from partitions.datasets.loading import DATASETS, Info, data_root
from partitions.federations import Federation, novel_shots
from partitions.shares import Share


def make_client(context: Context, method: str) -> Client:
    """The method's client for this node.

    Its data are at the node's ``data-path``, else its partition of the dataset. A real node
    imports only what its own `allow` names, and reads no folder that a server names. The command
    that simulates clients has checked their configuration. Raises ValueError if the node has no
    data, or the federation's size is not num-clients."""
    node = context.node_config
    model = str(node.get("model", ""))
    simulated = is_simulated(context)
    if not simulated:
        external_code.allow(*external_code.named(str(node.get("allow", ""))))
    config = completed(context.run_config, trusted=simulated)
    check_method(method)
    if not simulated:
        config = config | {"data-dir": str(node.get("data-dir", ""))}
        # A node that has its data in a folder of its own needs the run's for public samples alone.
        if "data-path" not in node or METHODS[method].client.needs_public:
            config |= in_data_folder(config)
    client_id = identity(context)
    card = service.card_of(context)
    if card is not None:
        config = config | WITHOUT_SCORES
        share = service.node_inputs(context, card).share
        info = card.info()
        if share.novel:
            # The id seeds random draws: equal data give equal predictions on every node.
            client_id = CLIENT
    elif "data-path" in node:
        share, info = _load_share(str(node["data-path"]))
        seed = seed_of(int(config["seed"]), "shots", client_id)
        share = share.with_shots(novel_shots(config), seed)
    else:
        _check_partition(node.get("num-partitions"), config["num-clients"])
        if not simulated:
            config = _with_rate(config, context, partitions.task(config))
        federation, builder = _federation(config, method)
        return builder.client(federation.share(client_id), client_id, model)
    if share.novel and "descriptor-epsilon" in node:
        config = config | own_privacy(config, method, float(node["descriptor-epsilon"]))
    if not simulated:
        config = _with_rate(config, context, info)
    client = Builder(config, method, info).client(share, client_id, model)
    if card is None and not share.novel:
        client.common = {SCALING: _scaling(share)}
    return client


def simulated_client(config: Config, method: str, client_id: int) -> Client:
    """The method's client of this id in a simulation of the run."""
    node = dict(simulated_node(client_id, int(config["num-clients"])))
    return make_client(Context(0, 0, node, RecordDict(), config), method)


def _scaling(share: Share) -> str:
    """A digest of the constants that scale the inputs, and the values to predict."""
    whole = share.everything
    constants = (whole.scale, whole.mean, whole.std, share.targets.mean, share.targets.std)
    return hashlib.sha256(repr(constants).encode()).hexdigest()[:16]


def _with_rate(config: Config, context: Context, info: Info) -> Config:
    """The configuration with the default learning rate of the task that a real node's data have."""
    if is_resolved(context.run_config):  # by `fedapps run`, which read the data
        return config
    return with_rate_of_task(config, defaults(), said(context.run_config), info.task)


def _check_partition(count: Any, expected: Any) -> None:
    """Raise ValueError unless the node's `count` of partitions is the `expected` number of
    clients: another count would give it other samples."""
    if not count:
        raise ValueError(
            "the node's configuration names neither its data (data-path) nor its number "
            "(partition-id and num-partitions)"
        )
    if count != expected:
        raise ValueError(f"the federation has {count} clients, but num-clients is {expected}")


def _federation(config: Config, method: str) -> tuple[Federation, Builder]:
    """The configuration's federation, and what builds its clients. Every message needs them, so the
    last ones are cached, by the configuration's identity (see `completed`)."""
    for known, name, federation, builder in [*_federations]:
        if known is config and name == method:
            return federation, builder
    federation = partitions.federation(with_public(config, method))
    builder = Builder(config, method, federation.info)
    _federations.appendleft((config, method, federation, builder))
    return federation, builder


_federations: deque[tuple[Config, str, Federation, Builder]] = deque(maxlen=8)
partitions.forgetting.append(_federations.clear)


def _load_share(folder: str) -> tuple[Share, Info]:
    """The node's data, read again if its files have changed."""
    return _share_of(folder, fingerprint(Path(folder), recursive=False))


@lru_cache(maxsize=8)
def _share_of(folder: str, files: str) -> tuple[Share, Info]:
    return Share.load(folder)


def own_privacy(config: Config, method: str, epsilon: float) -> Config:
    """The method's settings of a novel client's descriptor, no weaker than the node's own ε at the
    default δ; 0 sets none."""
    epsilon_key = f"{method}.descriptor-epsilon"
    delta_key = f"{method}.descriptor-delta"
    if not epsilon or epsilon_key not in config:
        return {}
    run_epsilon = float(config[epsilon_key]) or epsilon  # 0: the run sets none
    return {
        epsilon_key: min(epsilon, run_epsilon),
        delta_key: min(float(defaults()[delta_key]), float(config[delta_key])),
    }


def in_data_folder(config: Config) -> Config:
    """The paths of data that a run names, inside of this machine's data folder alone. Raises
    ValueError, the same for a path outside and for one that does not exist."""
    paths: Config = {}
    root = data_root(str(config["data-dir"]))
    for key in ("dataset", "partition.novel-dataset"):
        name = str(config[key])
        if not name or name in DATASETS or is_reference(name):
            continue
        # Resolved, so that neither ".." nor a link leads out of the folder.
        place = (Path(root) / name).resolve()
        if not root or not place.is_relative_to(Path(root).resolve()) or not place.exists():
            raise ValueError(
                f"{key} is {name!r}; a node reads such data from the data-path of its node "
                "configuration, or below the data-dir there"
            )
        paths[key] = str(place)
    return paths


class App(ClientApp):
    """Registers a handler for an exchange when its first message arrives: the exchanges of methods
    from outside the package are not known before."""

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply; `reply_of` refuses exchanges that the method does not have."""
        message_type = message.metadata.message_type
        if message_type.partition(".")[2] and message_type not in self._registered_funcs:
            register(self, message_type, answer)
        # Flower, which starts a node's process, leaves torch all cores.
        with torch_defaults(), one_thread():
            return super().__call__(message, context)


def answer(message: Message, context: Context) -> Message:
    """The reply of the node's client to a message, within the terms of privacy.

    Raises ValueError for a message that these do not allow."""
    terms = agreed_terms(message, context)
    if terms.given is not None:
        return terms.given
    reply = unprotected(message, context)
    return protected(reply, message, context, terms)


def unprotected(message: Message, context: Context) -> Message:
    """The reply of the node's client to a message."""
    try:
        client = make_client(context, method_of(message, context))
        return reply_of(client, message, context)
    except Exception as error:
        return opening_error(error, message, context)


def _answer_simulated(message: Message, context: Context) -> Message:
    """Send or restore the state of a virtual client; that of a real node stays on it."""
    if not is_simulated(context):
        raise PermissionError("what a real node keeps stays on it")
    return unprotected(message, context)


app = App()
for _type in ("query", "train", "evaluate"):
    register(app, _type, answer)
for _type in ("query.get_state", "train.set_state"):
    register(app, _type, _answer_simulated)
register(app, WANTS, service.wants)
register(app, SERVE, lambda message, context: service.serve(message, context, make_client))
host = HostingApp(app)  # answers for all clients of a node
