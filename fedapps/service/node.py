"""A node that is served: it says whether it wants its model, gets it, predicts and keeps it.

Predictions, labels and accuracies stay on the node."""

import json
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict

from clients.base import Client
from clients.protocol import RUN_TOKEN
from fedapps.node.bridge import load_state, unpack
from fedapps.results.card import Card
from fedapps.service.delivery import REPORT, Served
from fedapps.service.inputs import Inputs, read_inputs

Make = Callable[[Context, str], Client]
CLIENT = 0  # whom a novel client's draws are by, so that equal data give equal predictions


def card_of(context: Context) -> Card | None:
    """The card of the run that the node is served from, None where a run trains."""
    text = str(context.run_config.get("serving", ""))
    return Card.parse(text) if text else None


def inputs_of(context: Context, card: Card) -> Inputs:
    """The node's own data. Raises ValueError if its configuration names none."""
    if "data-path" not in context.node_config:
        raise ValueError("the node's configuration must name its data: data-path")
    return read_inputs(Path(str(context.node_config["data-path"])), card)


def wants(message: Message, context: Context) -> Message:
    """Whether the node lacks the model of this run for the data that it has now."""
    card = card_of(context)
    assert card is not None
    inputs = inputs_of(context, card)
    file, wanting = _state_dir(context) / REPORT, True
    if file.is_file() and not unpack(message.content)[0].get("again"):
        before = json.loads(file.read_text("utf-8"))
        wanting = (before["run"], before["data"]) != (card.run, inputs.digest())
    told = MetricRecord({"wants": int(wanting)})
    return Message(RecordDict({"metrics": told}), reply_to=message)


def serve(message: Message, context: Context, make: Make) -> Message:
    """Adapt or take what the server sent, and leave the files in the node's state-dir."""
    card = card_of(context)
    assert card is not None
    inputs = inputs_of(context, card)
    served = served_by(message, context, make, card, inputs)
    served.write(_state_dir(context))
    return acknowledged(message)


def served_by(message: Message, context: Context, make: Make, card: Card, inputs: Inputs) -> Served:
    """What the client that `make` builds is left with. It holds the share of `inputs`.

    Raises ValueError for a training client whose personal part is not on this node."""
    config, arrays = unpack(message.content)
    method = str(config["method"])
    client = make(context, method)
    client.state = load_state(context, method, client, str(config.get(RUN_TOKEN, "")))
    if client.personal and not client.share.novel and not client.state:
        raise ValueError(
            f"the personal part of training client {client.client} is not here; "
            f"a node keeps it in the state-dir that it trained with, until another run trains it"
        )
    network, logits = client.serve(arrays, config)
    return Served(card, network.cpu(), logits.cpu(), inputs, dict(client.adapted))


def acknowledged(message: Message) -> Message:
    """The answer to the server: that it is done, nothing of the data."""
    return Message(RecordDict({"metrics": MetricRecord()}), reply_to=message)


def _state_dir(context: Context) -> Path:
    if "state-dir" not in context.node_config:
        raise ValueError("the node's configuration must name where its model goes: state-dir")
    return Path(str(context.node_config["state-dir"]))
