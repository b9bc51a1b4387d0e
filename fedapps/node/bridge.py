"""From a Flower message to a client's call and back: arrays by name, and the client's state."""

import time
from contextlib import AbstractContextManager, nullcontext
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.logger import log
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from clients.core.arrays import Arrays, filled, from_record, reply_with, to_metrics, to_record
from clients.core.client import Client
from clients.core.protocol import (
    CAPABILITIES,
    CLIENT,
    DOMAIN,
    LOSS,
    MAX_REASON,
    NUM_EXAMPLES,
    RESTORE_STATE,
    RUN_TOKEN,
    SAVE_STATE,
    SECONDS,
    START_ERROR,
    Metrics,
    round_of,
)
from clients.core.single_samples import naming_single_inputs, naming_single_samples
from clients.core.unknown_tokens import naming_tokens
from fedapps.common.errors import brief, printable
from fedapps.common.seeds import drawing_beside_torch, seed_of
from fedapps.files import locked, write_arrays
from fedapps.node.context import identity, log_error, method_of, raises_errors, reason_of

# Keys in context.state, followed by the method: of a client's state, and of the part of it that
# stays when another method follows.
STATE = "fedapps."
ACROSS_RUNS = "fedapps-across-runs."


def register(app: ClientApp, message_type: str, handler: ClientAppCallable) -> None:
    """Let `handler` answer the messages of that type, such as "query" or "train.more"."""
    category, _, action = message_type.partition(".")
    getattr(app, category)(action or "default")(handler)


def opening_error(error: Exception, message: Message, context: Context) -> Message:
    """The answer to the opening query of a client that cannot start: the reason.

    Thereby the server distinguishes it from a foreign app, whose handler may raise. The `error` of
    any other message is raised again, and so is one for a person who debugs."""
    if message.metadata.message_type != "query" or raises_errors(context):
        raise error
    log_error("this client cannot start", error, context)
    reason = printable(brief(reason_of(error, context)))
    if len(reason) > MAX_REASON:
        reason = reason[: MAX_REASON - 2] + " …"
    properties = ConfigRecord({CAPABILITIES: "", START_ERROR: reason})
    return Message(RecordDict({"properties": properties}), reply_to=message)


def reply_of(client: Client, message: Message, context: Context) -> Message:
    """The reply of the method's client to the message.

    The client's state is loaded before, and stored after ``train`` messages and those in
    `saves_state_after`, so evaluation changes nothing. It is also written to the node's
    ``state-dir``, with the message's ``run-token``, before the reply leaves."""
    config, arrays = unpack(message.content)
    action = message.metadata.message_type
    method = method_of(message, context)
    token = str(config.get(RUN_TOKEN, ""))
    must_store = action in client.saves_state_after
    lock: AbstractContextManager[None] = nullcontext()
    file = _state_file(context, method)
    if file is not None and must_store and client.state_across_runs:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(file.parent, wait=True)  # another run may be spending the same budget
    with lock:
        client.state = load_state(context, method, client, token)
        records: dict[str, Any]
        if action == "query":
            records = _query(client, context, config)
        else:
            client.begin(action, config)
            seed = seed_of(client.seed, action, round_of(config), client.client)
            with naming_tokens(client), drawing_beside_torch(seed):
                if action == "train":
                    records = _train(client, arrays, config)
                elif action == "evaluate":
                    records = _evaluate(client, arrays, config)
                else:
                    _check_exchange(client, action, context, method)
                    records = _exchange(client, action, arrays, config)
        if must_store or action.startswith("train"):
            _store_state(context, method, client, token, must=must_store)
    return reply_with(filled(RecordDict(), records), message)


def _query(client: Client, context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """The records of a reply to the opening query: who the client is and what it can do."""
    client.check_own_code()
    properties = client.get_properties(config)
    properties[CLIENT] = identity(context)
    properties[CAPABILITIES] = " ".join((*client.offers, *client.exchanges))
    return {"properties": ConfigRecord(properties)}


def _train(client: Client, arrays: Arrays, config: dict[str, Any]) -> dict[str, Any]:
    """The records of a reply to ``train``: named arrays, sample count and metrics."""
    with naming_single_samples(client):
        trained, num_examples, metrics = client.train(arrays, config)
    return {
        "arrays": to_record(trained),
        "metrics": to_metrics({NUM_EXAMPLES: num_examples, **metrics}),
    }


def _evaluate(client: Client, arrays: Arrays, config: dict[str, Any]) -> dict[str, Any]:
    """The record of a reply to ``evaluate``: sample count, loss and metrics. Without a labeled
    sample there is no loss."""
    started = time.monotonic()
    with naming_single_inputs(client):
        loss, num_examples, metrics = client.score(arrays, config)
    metrics[SECONDS] = time.monotonic() - started
    scores: dict[str, float] = {NUM_EXAMPLES: num_examples}
    if num_examples:
        scores[LOSS] = loss
    return {"metrics": to_metrics(scores | metrics)}


def _exchange(
    client: Client, action: str, arrays: Arrays, config: dict[str, Any]
) -> dict[str, Any]:
    """The records of a reply to a further message. Its type names the client's method that answers:
    `encode` answers ``query.encode``."""
    answer: Arrays = {}
    metrics: Metrics = {}
    if action == SAVE_STATE:
        answer = client.state
    elif action == RESTORE_STATE:
        client.state = dict(arrays)
    else:
        method = getattr(client, action.partition(".")[2])
        answer, metrics = method(arrays, config)
    return {
        "arrays": to_record(answer),
        "metrics": to_metrics({NUM_EXAMPLES: len(client.share.train), **metrics}),
    }


def _check_exchange(client: Client, action: str, context: Context, method: str) -> None:
    """Raise ValueError for a message that the client does not answer."""
    exchanges = [*client.exchanges, SAVE_STATE, RESTORE_STATE]
    if context.run_config.get("report-generalization-bound"):
        exchanges.append(DOMAIN)
    if action not in exchanges:
        raise ValueError(f"{method} answers no {action!r}; its exchanges: {client.exchanges}")


def unpack(content: RecordDict) -> tuple[dict[str, Any], Arrays]:
    """The message's config, and its named arrays, which are read-only."""
    config: dict[str, Any] = {}
    arrays: Arrays = {}
    for record in content.values():
        if isinstance(record, ArrayRecord):
            arrays |= from_record(record, copy=False)
        elif isinstance(record, ConfigRecord):
            config.update(record.items())
    return config, arrays


def _state_file(context: Context, method: str) -> Path | None:
    """The file of the method's state in the node's ``state-dir``, None without this folder.

    Its name does not contain the node's id, which the server decides. Raises ValueError for a
    method's name that is no file name."""
    folder = context.node_config.get("state-dir")
    if not folder:
        return None
    if Path(method).name != method:  # it comes from a message
        raise ValueError(f"{method!r:.200} is no method: it cannot name a file")
    node = context.node_config
    client = f"-{node['partition-id']}" if "partition-id" in node else ""
    return Path(str(folder)) / f"{method}{client}.safetensors"


def load_state(context: Context, method: str, client: Client, token: str = "") -> Arrays:
    """The method's state of the client on this node; states of other methods are dropped.

    Without a state in memory it is that in the file, if the run of this `token` wrote it, or if
    either has no token. From the file of another run only `state_across_runs` arrays are taken.
    These are always the file's, even if memory has some, and they stay when methods change."""
    _drop_other_methods(context, method)
    state = _arrays(context, STATE + method)
    across_runs = _arrays(context, ACROSS_RUNS + method)
    lasting = client.state_across_runs
    file = _state_file(context, method)
    if file is not None and not file.is_file():
        file = None  # nothing is stored yet
    if file is not None and not state:
        saved, writer = _read_state(file)
        same_run = "" in (token, writer) or token == writer
        if same_run:
            return saved
        across_runs = saved
    elif file is not None and lasting:
        # Another run may have written the file since this process stored its state.
        across_runs, _ = _read_state(file)
    loaded = {name: array for name, array in state.items() if not name.startswith(lasting)}
    for name, array in across_runs.items():
        if name.startswith(lasting):
            loaded[name] = array
    return loaded


def _read_state(file: Path) -> tuple[Arrays, str]:
    """The arrays of a state's file, and the token of the run that wrote it, "" without one. Raises
    ValueError if it is damaged."""
    try:
        with safe_open(file, "numpy") as content:
            writer = (content.metadata() or {}).get(RUN_TOKEN, "")
        saved = dict(sorted(load_file(file).items()))  # else their order is random
    except SafetensorError as error:
        raise ValueError(
            f"{file}, what the client keeps, is damaged ({error}); put a copy in its place, or "
            "remove it, and the client begins anew"
        ) from error
    return saved, writer


def _drop_other_methods(context: Context, method: str) -> None:
    """Remove the states of other methods from memory: a run's methods follow each other."""
    for key in list(context.state):
        if key.startswith(STATE) and key != STATE + method:
            del context.state[key]


def _arrays(context: Context, key: str) -> Arrays:
    record = context.state.get(key)
    return from_record(record) if isinstance(record, ArrayRecord) else {}


def _store_state(context: Context, method: str, client: Client, token: str, *, must: bool) -> None:
    """Store the client's state; in memory alone, until its next training, if the disk is full.

    A state that is not finite is not stored. With `must` both raise, OSError and ValueError: no
    answer may leave a node that could forget that it gave it."""
    if not client.state:
        return
    broken = [name for name, array in client.state.items() if not np.isfinite(array).all()]
    if broken:
        reason = f"not finite and not kept: {', '.join(broken)}"
        if must:
            raise ValueError(reason)
        log(WARNING, "%s", reason)
        return
    file = _state_file(context, method)
    try:
        if file is not None:
            write_arrays(file, client.state, {RUN_TOKEN: token} if token else None)
    except OSError as error:
        if must:
            raise
        log(WARNING, "%s is not written (%s); the state is in memory alone", file, error)
    context.state[STATE + method] = to_record(client.state)
    across_runs: Arrays = {}
    for name, array in client.state.items():
        if name.startswith(client.state_across_runs):
            across_runs[name] = array
    if across_runs:
        context.state[ACROSS_RUNS + method] = to_record(across_runs)
