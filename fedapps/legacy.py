"""Clients of Flower's older kind, which a `client_fn` makes, for strategies of its present kind."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import (
    Code,
    EvaluateIns,
    FitIns,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)

from clients.arrays import to_record
from clients.protocol import NAMES
from fedapps.node.bridge import identity, unpack


def from_client_fn(client_fn: Callable[[Any], Any]) -> ClientApp:
    """A ClientApp whose messages the clients answer that `client_fn` makes of a Context, or of a
    ``cid`` as the oldest did: a NumPyClient, a Client, or what ``to_client()`` gives.

    They get the message's config and the arrays in order; of their metrics the numbers come back.
    """
    ((name, first),) = inspect.signature(client_fn).parameters.items()
    by_cid = name == "cid" or first.annotation in (str, "str")
    app = ClientApp()

    def client_of(context: Context) -> Any:
        return client_fn(str(identity(context)) if by_cid else context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, (config, arrays) = client_of(context), _read(message)
        if isinstance(client, NumPyClient):
            trained, count, metrics = client.fit(list(arrays.values()), config)
        else:
            done = client.fit(FitIns(ndarrays_to_parameters(list(arrays.values())), config))
            _check(done)
            trained, count = parameters_to_ndarrays(done.parameters), done.num_examples
            metrics = done.metrics
        if len(trained) != len(arrays):
            raise ValueError(f"fit got {len(arrays)} arrays and returned {len(trained)}")
        reply = RecordDict({"arrays": to_record(dict(zip(arrays, trained, strict=True)))})
        reply["metrics"] = MetricRecord(_numbers(metrics | {"num-examples": count}))
        return Message(reply, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, (config, arrays) = client_of(context), _read(message)
        if isinstance(client, NumPyClient):
            loss, count, metrics = client.evaluate(list(arrays.values()), config)
        else:
            ins = EvaluateIns(ndarrays_to_parameters(list(arrays.values())), config)
            done = client.evaluate(ins)
            _check(done)
            loss, count, metrics = done.loss, done.num_examples, done.metrics
        told = {"loss": loss} | metrics | {"num-examples": count}
        return Message(RecordDict({"metrics": MetricRecord(_numbers(told))}), reply_to=message)

    return app


def _read(message: Message) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config, arrays = unpack(message.content)
    return {key: value for key, value in config.items() if key != NAMES}, arrays


def _check(done: Any) -> None:
    if done.status.code != Code.OK:
        raise RuntimeError(done.status.message or f"the client answered {done.status.code.name}")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among the metrics, as Python's own; a record of metrics holds nothing else."""
    found = {k: v.item() if isinstance(v, np.generic) else v for k, v in metrics.items()}
    return {k: v for k, v in found.items() if type(v) in (int, float)}
