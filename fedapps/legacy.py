"""Clients of Flower's older API, which a `client_fn` makes, for strategies of its present API."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.arrays import to_record
from clients.compat import (
    Code,
    EvaluateIns,
    FitIns,
    NumPyClient,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from clients.protocol import NAMES
from fedapps.node.bridge import identity, unpack


def from_client_fn(client_fn: Callable[[Any], Any]) -> ClientApp:
    """A ClientApp around the clients that `client_fn` makes of a Context, or of a ``cid``.

    A client is a NumPyClient, a Client, or what ``to_client()`` returns. It gets the message's
    config and the arrays in order. Only numbers of its metrics are sent."""
    ((name, first),) = inspect.signature(client_fn).parameters.items()
    by_cid = name == "cid" or first.annotation in (str, "str")
    app = ClientApp()

    def called(message: Message, context: Context) -> tuple[Any, Any, list[str], list[Any]]:
        """The client, the config, and the arrays' names and values."""
        client = client_fn(str(identity(context)) if by_cid else context)
        config, arrays = unpack(message.content)
        del config[NAMES]
        return client, config, list(arrays), list(arrays.values())

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, config, names, arrays = called(message, context)
        if isinstance(client, NumPyClient):
            trained, count, metrics = client.fit(arrays, config)
        else:
            result = client.fit(FitIns(ndarrays_to_parameters(arrays), config))
            _check(result)
            trained, count = parameters_to_ndarrays(result.parameters), result.num_examples
            metrics = result.metrics
        if len(trained) != len(names):
            raise ValueError(f"fit got {len(names)} arrays and returned {len(trained)}")
        records = {"arrays": to_record(dict(zip(names, trained, strict=True)))}
        return _reply(message, metrics | {"num-examples": count}, records)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, config, _, arrays = called(message, context)
        if isinstance(client, NumPyClient):
            loss, count, metrics = client.evaluate(arrays, config)
        else:
            result = client.evaluate(EvaluateIns(ndarrays_to_parameters(arrays), config))
            _check(result)
            loss, count, metrics = result.loss, result.num_examples, result.metrics
        return _reply(message, {"loss": loss} | metrics | {"num-examples": count}, {})

    return app


def _check(result: Any) -> None:
    if result.status.code != Code.OK:
        reason = result.status.message or f"the client answered {result.status.code.name}"
        raise RuntimeError(reason)


def _reply(message: Message, metrics: Mapping[str, Any], records: dict[str, Any]) -> Message:
    """A reply with `records` and the numbers of `metrics`; a record of metrics holds no others."""
    values = {k: v.item() if isinstance(v, np.generic) else v for k, v in metrics.items()}
    numbers = MetricRecord({k: v for k, v in values.items() if type(v) in (int, float)})
    return Message(RecordDict(records | {"metrics": numbers}), reply_to=message)
