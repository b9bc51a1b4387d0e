"""Flower Message ↔ NumPyClient call: names to lists, records to arrays, state kept."""

import sys
from collections.abc import Callable
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from safetensors import safe_open
from safetensors.numpy import load_file

from clients.arrays import Arrays, from_record, to_record
from clients.base import Client
from clients.messages import answer_exchange
from clients.protocol import DOMAIN, NAMES, OFFERS, RESTORE_STATE, RUN_TOKEN, SAVE_STATE
from fedapps.files import write_arrays

SIMULATED = "simulated"  # node configuration of the in-process engine's clients
STATE = "fedapps."  # start of the key of the client's state in context.state; the method follows


Make = Callable[[Context, str], Client]


def answer(message: Message, context: Context, make: Make) -> Message:
    """As `reply_to`, but who it is a client always tells, be it that it cannot start and why: so it
    is known from an app that is not ours, whose handler may raise."""
    try:
        return reply_to(message, context, make)
    except Exception as error:
        if message.metadata.message_type != "query":
            raise
        log(ERROR, "this client cannot start", exc_info=error)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        told = ConfigRecord({OFFERS: "", "error": reason})
        return Message(RecordDict({"properties": told}), reply_to=message)


def reply_to(message: Message, context: Context, make: Make) -> Message:
    """Let the client that `make` builds for the method at hand answer the message.

    The method is the message's ``method``, else the run's. The client's state is loaded before
    and stored after ``train`` messages and those in `saves_state_after`, so evaluation changes
    nothing; it is also written to the node's ``state-dir``, if it has one, under the ``run-token``
    of the message. That happens before the reply leaves."""
    config, arrays = unpack(message.content)
    method = str(config.get("method", context.run_config.get("method", "")))
    client = make(context, method)
    token = str(config.get(RUN_TOKEN, ""))
    client.state = load_state(context, method, client, token)
    action = message.metadata.message_type
    reply = RecordDict()
    if action == "query":
        told = client.get_properties(config) | {"client": identity(context)}
        told[OFFERS] = " ".join((*client.offers, *client.exchanges))
        reply["properties"] = ConfigRecord(told)
    elif action == "train":
        values, num_examples, metrics = client.fit(list(arrays.values()), config)
        names = [name for name in metrics.pop(NAMES).split("\n") if name]
        reply["arrays"] = to_record(dict(zip(names, values, strict=True)))
        reply["metrics"] = MetricRecord({"num-examples": num_examples, **metrics})
    elif action == "evaluate":
        loss, num_examples, metrics = client.evaluate(list(arrays.values()), config)
        reply["metrics"] = MetricRecord({"num-examples": num_examples, "loss": loss, **metrics})
    elif action not in (*client.exchanges, *_common(context)):
        raise ValueError(f"{method} answers no {action!r}; its exchanges: {client.exchanges}")
    else:
        named, metrics = answer_exchange(client, action, arrays, config)
        reply["arrays"] = to_record(named)
        reply["metrics"] = MetricRecord({"num-examples": len(client.share.train), **metrics})
    if action.startswith("train") or action in client.saves_state_after:
        _store_state(context, method, client, token, must=action in client.saves_state_after)
    return Message(reply, reply_to=message)


def _common(context: Context) -> tuple[str, ...]:
    """The exchanges that every method's client answers in this run."""
    return (
        (SAVE_STATE, RESTORE_STATE, DOMAIN)
        if context.run_config.get("bound")
        else (SAVE_STATE, RESTORE_STATE)
    )


def identity(context: Context) -> int:
    """The id of the client on this node: its partition's if it has one, else the node's."""
    return int(context.node_config.get("partition-id", context.node_id))


def is_simulated(context: Context) -> bool:
    """Whether the client is a virtual one, whose server is the same program."""
    ray = sys.modules.get("ray")
    return bool(context.node_config.get(SIMULATED) or (ray and ray.is_initialized()))


def unpack(content: RecordDict) -> tuple[dict[str, Any], Arrays]:
    """The message's config, the arrays' names in it, and its named arrays."""
    config: dict[str, Any] = {}
    arrays: Arrays = {}
    for record in content.values():
        if isinstance(record, ArrayRecord):
            arrays |= from_record(record)
        elif isinstance(record, ConfigRecord):
            config.update(record.items())
    return config | {NAMES: "\n".join(arrays)}, arrays


def _state_file(context: Context, method: str, client: Client) -> Path | None:
    folder = context.node_config.get("state-dir")
    if Path(method).name != method:  # a message tells it
        raise ValueError(f"{method!r:.200} is no method: it cannot name a file")
    return Path(str(folder)) / f"{method}-{client.client}.safetensors" if folder else None


def load_state(context: Context, method: str, client: Client, token: str = "") -> Arrays:
    """What the client of the method at hand kept on this node; that of other methods is dropped.

    Of a file that a run of another `token` wrote only `state_across_runs` is taken; a file without
    a token belongs to every run."""
    for key in [k for k in context.state if k.startswith(STATE) and k != STATE + method]:
        del context.state[key]  # a run's methods follow each other; the last one's state is done
    if STATE + method in context.state:
        record = context.state[STATE + method]
        assert isinstance(record, ArrayRecord)
        return from_record(record)
    file = _state_file(context, method, client)
    if file is None or not file.is_file():
        return {}
    with safe_open(file, "numpy") as content:
        writer = (content.metadata() or {}).get(RUN_TOKEN, token)
    state = load_file(file)
    if token in ("", writer):
        return state
    return {
        name: array for name, array in state.items() if name.startswith(client.state_across_runs)
    }


def _store_state(context: Context, method: str, client: Client, token: str, *, must: bool) -> None:
    """Keep the client's state, until its next training in memory alone where the disk is full.

    With `must` that raises OSError: no answer leaves a node that could forget it gave it. A state
    that is not finite is not kept, so that the client goes on from the one before; with `must`
    that raises ValueError."""
    if not client.state:
        return
    if spoilt := [n for n, a in client.state.items() if not np.isfinite(a).all()]:
        message = f"not finite and not kept: {', '.join(spoilt)}"
        if must:
            raise ValueError(message)
        log(WARNING, "%s", message)
        return
    file = _state_file(context, method, client)
    try:
        if file is not None:
            write_arrays(file, client.state, {RUN_TOKEN: token} if token else None)
    except OSError as error:
        if must:
            raise
        log(WARNING, "%s is not written (%s); what it would hold is in memory alone", file, error)
    context.state[STATE + method] = to_record(client.state)
