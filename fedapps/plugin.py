"""Any method in somebody else's Flower app: a network and data make its two components."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch import Tensor, nn
from torch.utils.data import DataLoader

from clients.arrays import Arrays, model_arrays, to_record
from clients.base import Client, Criterion
from clients.models.head import headed
from clients.models.roles import check_tied
from clients.preference import GlobalClient
from fedapps.methods import METHODS
from fedapps.node.bridge import answer, identity
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

    `data` gives a node's samples: training ones, or a pair of training and validation ones, each a
    DataLoader, a dataset, a tensor of inputs or a pair of tensors (x, y). A node without any label,
    or with ``novel=true`` in its node configuration, is a novel client. `public` gives the inputs
    that FedMD's methods learn from; `loss` stands for the cross entropy of logits and labels;
    `settings` are the method's and the common ones, see `fedapps list methods` and pyproject.

    Raises ValueError for an unknown method or setting."""
    config = _configuration(method, settings)

    def make(context: Context, _: str) -> Client:
        share = share_of(data(context), context, public)
        built, initial = _network(method, model, config, tuple(share.everything.x.shape[1:]))
        client: Client = construct(
            METHODS[method].client,
            built,
            share,
            config=config,
            method=method,
            client=identity(context),
            initial=initial,
        )
        client.criterion = loss or client.criterion
        return client

    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        return answer(message, context, make)

    for exchange in ("query", "train", "evaluate", *METHODS[method].client.exchanges):
        category, _, action = exchange.partition(".")
        getattr(app, category)(action or "default", mods=[guarded])(handle)
    return app


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

    It runs `rounds` rounds (0: the app's ``num-server-rounds``) once `min_available_nodes` are
    there, and hands the result to `then`. `settings` must be the clients'.

    Raises ValueError for an unknown method or setting."""
    config, entry = _configuration(method, settings), METHODS[method]
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        network, initial = _network(method, model, config, shape)
        strategy: PersonalizedStrategy = construct(
            entry.strategy,
            config=config,
            method=method,
            min_available_nodes=min_available_nodes,
            evaluate_novel=bool(entry.novel),
            **({"network": network} if "network" in accepted(entry.strategy) else {}),
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=to_record(
                {name: a for name, a in initial.items() if not entry.client.is_personal(name)}
            ),
            num_rounds=rounds or int(context.run_config.get("num-server-rounds", 3)),
            train_config=ConfigRecord({"method": method}),
        )
        if then is not None:
            then(result, strategy)

    return app


def share_of(given: Any, context: Context, public: Callable[[], Tensor] | None = None) -> Share:
    """What a node's `data` function gave, as a client's share."""
    pair = isinstance(given, tuple | list) and len(given) == 2 and not _tensors(given)
    parts = [_samples(part) for part in (given if pair else [given])]
    train, unlabeled = parts[0], bool((parts[0].y[parts[0].index] == UNLABELED).all())
    nothing = _rows(train, slice(0, 0))
    novel = unlabeled or bool(context.node_config.get("novel", False))
    validation = parts[1] if pair else nothing
    others = None if public is None else from_tensors(public())
    return Share(nothing if novel else train, validation, None, train, novel, {}, others)


def _samples(part: Any) -> Samples:
    if isinstance(part, Tensor):
        return from_tensors(part)
    if _tensors(part):
        return from_tensors(*part)
    return from_items(part.dataset if isinstance(part, DataLoader) else part)


def _tensors(given: Any) -> bool:
    return isinstance(given, tuple | list) and all(isinstance(part, Tensor) for part in given)


def _rows(samples: Samples, rows: slice) -> Samples:
    return replace(samples, index=samples.index[rows])


def _configuration(method: str, settings: dict[str, Any]) -> Config:
    """The defaults with `settings`, a method's own key before a common one of the same name.

    What they name is the programmer's word, and allowed."""
    trust.allow(*trust.named([method, settings]))
    entry = METHODS[check_method(method)]
    if issubclass(entry.client, GlobalClient):
        able = [name for name, m in METHODS.items() if not issubclass(m.client, GlobalClient)]
        raise ValueError(
            f"{method} needs users whose tastes are known, as the preference partition makes them; "
            f"those that take any data: {', '.join(able)}"
        )
    config = defaults()
    changes = {}
    for name, value in settings.items():
        key = name.replace("_", "-")
        changes[f"{method}.{key}" if f"{method}.{key}" in config else key] = value
    config = override(config, changes)
    construct(entry.strategy, config=config, method=method)  # refuses what is out of range
    return config


def _network(
    method: str, model: Model, config: Config, shape: tuple[int, ...]
) -> tuple[nn.Module, Arrays]:
    """The method's whole network around the user's, and its initial arrays, by the seed alone."""
    client = METHODS[method].client
    with drawing(int(str(config["seed"]))):
        base = model()
        with torch.no_grad():
            classes = base.eval()(torch.zeros(1, *shape)).shape[1]
        if client.needs_head:
            base = headed(base, type(base).__name__, shape, classes)
        info = Info("own", shape, classes, "")
        whole = client.build_network(base, info, **of_method(config, method))
        built = check_tied(whole, client.is_separate, method)
    return built, model_arrays(built)
