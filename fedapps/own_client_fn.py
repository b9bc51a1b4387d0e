"""Clients that a user's `client_fn` makes, in a ClientApp that this package's strategies ask."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from typing import Any

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
from fedapps.common.once import say_once
from fedapps.common.seeds import drawing_anywhere
from fedapps.node.bridge import unpack
from fedapps.node.context import identity
from fedapps.node.mods import checked_mods

SEED_OF_CLIENT_FN = 0


def from_client_fn(client_fn: Callable[[Any], Any], mods: Sequence[Mod] | None = None) -> ClientApp:
    """A ClientApp around the clients that `client_fn` makes of a Context, or of a ``cid``.

    A client is a NumPyClient, a Client, or what ``to_client()`` returns. It gets the message's
    config and the arrays in order, in which it may write. Only the numbers of its metrics are sent,
    also those in a tensor. `mods` are Flower's, around each message: see `fedapps.node.mods`.
    Raises ValueError for one that could not work, and for a `client_fn` with other parameters."""
    around = checked_mods(mods)
    by_cid = _takes_cid(client_fn)
    app = ClientApp(mods=around)

    def called(message: Message, context: Context) -> tuple[Any, Any, list[str], list[Any]]:
        """The client, the config, and the arrays' names and values."""
        with drawing_anywhere(SEED_OF_CLIENT_FN):  # the same split of data for each message
            client = client_fn(str(identity(context)) if by_cid else context)
        if not hasattr(client, "fit"):
            raise TypeError(
                f"client_fn returned a {type(client).__name__}; it must return a NumPyClient or a "
                "Client"
            )
        config, arrays = unpack(message.content)
        # Copies, since a client may write into what it gets, as Flower's own engines allow.
        return client, config, list(arrays), [array.copy() for array in arrays.values()]

    @app.query()
    def query(message: Message, context: Context) -> Message:
        """Nothing: the server takes the node's id as the client's."""
        return Message(RecordDict(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, config, names, arrays = called(message, context)
        trained, count, metrics = _fit(client, arrays, config)
        if len(trained) != len(names):
            raise ValueError(f"fit got {len(names)} arrays and returned {len(trained)}")
        records = {"arrays": to_record(dict(zip(names, trained, strict=True)))}
        return _reply(message, "fit", metrics, count, records)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, config, _, arrays = called(message, context)
        loss, count, metrics = _evaluate(client, arrays, config)
        # The client's own "loss" counts.
        return _reply(message, "evaluate", {LOSS: loss} | dict(metrics or {}), count, {})

    return app


def _takes_cid(client_fn: Callable[[Any], Any]) -> bool:
    """Whether it takes a ``cid`` in place of a Context. Raises ValueError if it takes nothing, or
    has two or more parameters without a default."""
    parameters = list(inspect.signature(client_fn).parameters.values())
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if len(needed) > 1 or not parameters:
        names = ", ".join(parameter.name for parameter in needed) or "nothing"
        raise ValueError(f"client_fn takes {names}; it must take a Context alone, or a cid")
    first = parameters[0]
    return first.name == "cid" or first.annotation in (str, "str")


def _fit(client: Any, arrays: list[Any], config: Any) -> tuple[Sequence[Any], Any, Any]:
    """The trained arrays, the number of samples, and the metrics, None if there are none."""
    if isinstance(client, NumPyClient):
        return _three_values(client.fit(arrays, config), "fit", "arrays")
    result = client.fit(FitIns(ndarrays_to_parameters(arrays), config))
    _check_status(result)
    return parameters_to_ndarrays(result.parameters), result.num_examples, result.metrics


def _evaluate(client: Any, arrays: list[Any], config: Any) -> tuple[Any, Any, Any]:
    """The loss, the number of samples, and the metrics, None if there are none."""
    if isinstance(client, NumPyClient):
        return _three_values(client.evaluate(arrays, config), "evaluate", "the loss")
    result = client.evaluate(EvaluateIns(ndarrays_to_parameters(arrays), config))
    _check_status(result)
    return result.loss, result.num_examples, result.metrics


def _three_values(result: Any, method: str, first: str) -> tuple[Any, Any, Any]:
    """What a NumPyClient's method has returned. Raises ValueError unless it is three values."""
    if isinstance(result, tuple | list):
        if len(result) == 3:
            return result[0], result[1], result[2]
        returned = f"{len(result)} values"
    else:
        returned = type(result).__name__
    raise ValueError(
        f"{method} returned {returned}; it must return {first}, the number of samples, and a dict "
        "of metrics"
    )


def _check_status(result: Any) -> None:
    """Raise RuntimeError, with the client's reason, for a reply that is an error."""
    if result.status.code != Code.OK:
        reason = result.status.message or f"the client answered {result.status.code.name}"
        raise RuntimeError(reason)


def _reply(
    message: Message,
    method: str,
    metrics: Mapping[str, Any] | None,
    count: Any,
    records: dict[str, Any],
) -> Message:
    """A reply with `records`, the numbers of `metrics`, and the client's `count` of samples, by
    which the server weighs. A MetricRecord holds numbers alone: other metrics are left out, which
    is logged once, except for texts and truth values. Raises ValueError for a count that is no
    number."""
    numbers: dict[str, Any] = {}
    for name, value in (metrics or {}).items():
        number = _number(value)
        if number is not None:
            numbers[name] = number
        elif not isinstance(value, str | bytes | bool):
            kind = type(value).__name__
            text = f"{method} returned {name!r} as a {kind}, which is left out; return a number"
            say_once(text, WARNING)
    samples = _number(count)
    if samples is None:
        raise ValueError(
            f"{method} returned {count!r:.80} as its number of samples; it must be a number"
        )
    content = records | {"metrics": MetricRecord(numbers | {NUM_EXAMPLES: samples})}
    return Message(RecordDict(content), reply_to=message)


def _number(value: Any) -> int | float | None:
    """The value as Python's number, also of numpy's, and of an array or a tensor with one entry;
    None if it is none."""
    plain = value
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        plain = value.item()
    return plain if type(plain) in (int, float) else None  # a boolean is an instance of int
