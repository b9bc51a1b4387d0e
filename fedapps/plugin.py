"""Any method in your own Flower app: its two components, from a network and data."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clients.arrays import to_record
from clients.base import Client, Criterion
from clients.models.head import blank_inputs, headed
from clients.preference import GlobalClient
from fedapps.engines.grid import respond
from fedapps.methods import METHODS
from fedapps.node.bridge import answer, identity, register
from fedapps.node.building import Network, client_settings, network_around, shared_of
from fedapps.node.ledger import guarded
from fedapps.settings.config import Config, accepted, check_method, construct, defaults, override
from fedapps.settings.config import settings as of_method
from partitions import trust
from partitions.datasets import Info
from partitions.items import from_items, from_tensors
from partitions.readers.raw import UNLABELED
from partitions.seeds import drawing
from partitions.shares import Samples, Share
from strategies.base import PersonalizedStrategy

Model = Callable[[], nn.Module]
Data = Callable[[Context], Any]


def client_app(
    method: str,
    *,
    model: Model,
    data: Data,
    public: Callable[[], Tensor] | None = None,
    loss: Criterion | None = None,
    **settings: Any,
) -> ClientApp:
    """Flower's client half of `method`, around the network that `model` makes.

    `data` returns a node's samples: training samples, or a pair of training and validation
    samples. Each is a DataLoader (its dataset is used), a dataset, a tensor or array of inputs, or
    a pair of them (x, y). A node whose samples have no labels, or with ``novel=true`` in its
    configuration, is a novel client. `public` returns the inputs that FedMD's methods learn from.
    `loss` replaces the cross entropy of logits and labels. `settings` are the method's and the
    common ones, see `fedapps list methods` and pyproject.

    Raises ValueError for an unknown method or setting."""
    config = _configuration(method, settings)
    kind, given = METHODS[method].client, client_settings(config, method)

    def make_client(context: Context, _: str) -> Client:
        share = share_of(data(context), context, public)
        network, initial = _network(method, model, config, tuple(share.everything.x.shape[1:]))
        client = kind(network, share, client=identity(context), initial=initial, **given)
        client.criterion = loss or client.criterion
        return client

    def handle(message: Message, context: Context) -> Message:
        return answer(message, context, make_client)

    app = _App()
    for message_type in ("query", "train", "evaluate", *METHODS[method].client.exchanges):
        register(app, message_type, handle, guarded)
    return app


class _App(ClientApp):
    """Answers an error with its reason, as much as privacy allows."""

    def __call__(self, message: Message, context: Context) -> Message:
        return respond(super().__call__, message, context)


def server_app(
    method: str,
    *,
    model: Model,
    shape: tuple[int, ...],
    rounds: int = 0,
    min_available_nodes: int = 2,
    then: Callable[[Result, PersonalizedStrategy], None] | None = None,
    **settings: Any,
) -> ServerApp:
    """Flower's server half of `method`, for networks whose inputs are (n, *shape).

    It runs `rounds` rounds (0: the app's ``num-server-rounds``) once `min_available_nodes` have
    joined, and passes the result to `then`. `settings` must be the clients'.

    Raises ValueError for an unknown method or setting."""
    config, entry = _configuration(method, settings), METHODS[method]
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        network = _network(method, model, config, shape)
        strategy: PersonalizedStrategy = construct(
            entry.strategy,
            config=config,
            method=method,
            min_available_nodes=min_available_nodes,
            evaluate_novel=bool(entry.novel),
            **({"network": network[0]} if "network" in accepted(entry.strategy) else {}),
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=to_record(shared_of(network, method, of_method(config, method))),
            num_rounds=rounds or int(context.run_config.get("num-server-rounds", 3)),
            train_config=ConfigRecord({"method": method}),
        )
        if then is not None:
            then(result, strategy)

    return app


def share_of(given: Any, context: Context, public: Callable[[], Tensor] | None = None) -> Share:
    """A client's share of what its node's `data` function returned."""
    pair = isinstance(given, tuple | list) and len(given) == 2 and not _are_tensors(given)
    train, *validation = [_samples(part) for part in (given if pair else [given])]
    empty = replace(train, index=train.index[:0])
    unlabeled = bool((train.y[train.index] == UNLABELED).all())
    novel = unlabeled or bool(context.node_config.get("novel", False))
    public_samples = None if public is None else from_tensors(public())
    return Share(
        empty if novel else train,
        validation[0] if pair else empty,
        None,
        train,
        novel,
        {},
        public_samples,
    )


def _samples(part: Any) -> Samples:
    if isinstance(part, Tensor | np.ndarray):
        return from_tensors(part)
    if _are_tensors(part):
        return from_tensors(*part)
    return from_items(part.dataset if isinstance(part, DataLoader) else part)


def _are_tensors(given: Any) -> bool:
    arrays = (Tensor, np.ndarray)
    return isinstance(given, tuple | list) and all(isinstance(part, arrays) for part in given)


def _configuration(method: str, settings: dict[str, Any]) -> Config:
    """The defaults with `settings`; a method's own key wins over a common one of the same name.

    References in them are allowed: the programmer wrote them."""
    trust.allow(*trust.named([method, settings]))
    entry = METHODS[check_method(method)]
    if issubclass(entry.client, GlobalClient):
        able = [name for name, m in METHODS.items() if not issubclass(m.client, GlobalClient)]
        raise ValueError(
            f"{method} needs users whose tastes are known, as the preference partition makes them; "
            f"those that take any data: {', '.join(able)}"
        )
    config = defaults()
    keys = {name: name.replace("_", "-") for name in settings}
    changes = {
        f"{method}.{key}" if f"{method}.{key}" in config else key: settings[name]
        for name, key in keys.items()
    }
    config = override(config, changes)
    construct(entry.strategy, config=config, method=method)  # raises for a value out of range
    return config


def _network(method: str, model: Model, config: Config, shape: tuple[int, ...]) -> Network:
    """The method's network around the user's. The seed alone decides its initial arrays."""
    with drawing(int(str(config["seed"]))):
        base = model()
        with torch.no_grad():
            classes = base.eval()(blank_inputs(base, shape)).shape[1]
        if METHODS[method].client.needs_head:
            base = headed(base, type(base).__name__, shape, classes)
        info = Info("own", shape, classes, "")
        return network_around(base, method, info, of_method(config, method))
