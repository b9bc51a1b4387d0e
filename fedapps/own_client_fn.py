"""Clients that a user's `client_fn` makes, in a ClientApp that this package's strategies ask."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from clients.core.arrays import to_record
from clients.core.flower_fast import (
    Code,
    EvaluateIns,
    FitIns,
    NumPyClient,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from clients.core.protocol import LOSS, NUM_EXAMPLES
from fedapps.node.bridge import unpack
from fedapps.node.context import identity
from fedapps.node.mods import checked_mods


def from_client_fn(client_fn: Callable[[Any], Any], mods: Sequence[Mod] | None = None) -> ClientApp:
    """A ClientApp around the clients that `client_fn` makes of a Context, or of a ``cid``.

    A client is a NumPyClient, a Client, or what ``to_client()`` returns. It gets the message's
    config and the arrays in order. Only numbers of its metrics are sent. `mods` are Flower's,
    around each message: see `fedapps.node.mods`. Raises ValueError for one that could not work."""
    around = checked_mods(mods)
    ((name, first),) = inspect.signature(client_fn).parameters.items()
    by_cid = name == "cid" or first.annotation in (str, "str")
    app = ClientApp(mods=around)

    def called(message: Message, context: Context) -> tuple[Any, Any, list[str], list[Any]]:
        """The client, the config, and the arrays' names and values."""
        client = client_fn(str(identity(context)) if by_cid else context)
        config, arrays = unpack(message.content)
        return client, config, list(arrays), list(arrays.values())

    @app.query()
    def query(message: Message, context: Context) -> Message:
        """Nothing: the server takes the node's id as the client's."""
        return Message(RecordDict(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, config, names, arrays = called(message, context)
        if isinstance(client, NumPyClient):
            trained, count, metrics = client.fit(arrays, config)
        else:
            result = client.fit(FitIns(ndarrays_to_parameters(arrays), config))
            _check(result)
            trained = parameters_to_ndarrays(result.parameters)
            count = result.num_examples
            metrics = result.metrics
        if len(trained) != len(names):
            raise ValueError(f"fit got {len(names)} arrays and returned {len(trained)}")
        records = {"arrays": to_record(dict(zip(names, trained, strict=True)))}
        return _reply(message, metrics | {NUM_EXAMPLES: count}, records)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, config, _, arrays = called(message, context)
        if isinstance(client, NumPyClient):
            loss, count, metrics = client.evaluate(arrays, config)
        else:
            result = client.evaluate(EvaluateIns(ndarrays_to_parameters(arrays), config))
            _check(result)
            loss = result.loss
            count = result.num_examples
            metrics = result.metrics
        # The client's own "loss" counts, but not its "num-examples": the server weighs by that.
        return _reply(message, {LOSS: loss} | metrics | {NUM_EXAMPLES: count}, {})

    return app


def _check(result: Any) -> None:
    if result.status.code != Code.OK:
        reason = result.status.message or f"the client answered {result.status.code.name}"
        raise RuntimeError(reason)


def _reply(message: Message, metrics: Mapping[str, Any], records: dict[str, Any]) -> Message:
    """A reply with `records` and the numbers of `metrics`; a record of metrics holds no others."""
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if type(plain) in (int, float):  # a boolean is an instance of int
            numbers[name] = plain
    content = records | {"metrics": MetricRecord(numbers)}
    return Message(RecordDict(content), reply_to=message)
