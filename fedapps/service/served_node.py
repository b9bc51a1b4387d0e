"""A node that is served: it says whether it needs its model, receives it, predicts and keeps it.

Predictions, labels and accuracies stay on the node."""

from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict

from clients.core.client import Client
from clients.core.protocol import AGAIN, METHOD, RUN_TOKEN
from fedapps.node.bridge import load_state, unpack
from fedapps.results.card import Card
from fedapps.saved import read_json
from fedapps.service.delivery import REPORT, PersonalizationResult, result_of
from fedapps.service.inputs import Inputs, read_input_files
from fedapps.settings.config import completed

Make = Callable[[Context, str], Client]


def card_of(context: Context) -> Card | None:
    """The card of the run that the node is served from; None if the run trains."""
    text = str(context.run_config.get("serving", ""))
    return Card.parse(text) if text else None


def node_inputs(context: Context, card: Card) -> Inputs:
    """The node's data. Raises ValueError if its configuration names none."""
    return read_input_files(_folder(context, "data-path", "its data"), card)


def _folder(context: Context, key: str, what: str) -> Path:
    if key not in context.node_config:
        raise ValueError(f"the node's configuration must name {what}: {key}")
    return Path(str(context.node_config[key]))


def _state_dir(context: Context) -> Path:
    return _folder(context, "state-dir", "the folder of its model")


def _task(context: Context) -> tuple[Card, Inputs]:
    card = card_of(context)
    assert card is not None
    return card, node_inputs(context, card)


def wants(message: Message, context: Context) -> Message:
    """Whether the node lacks this run's model for its present data."""
    card, inputs = _task(context)
    folder = _state_dir(context)
    config, _ = unpack(message.content)
    wanted = bool(config.get(AGAIN)) or not _has_model(folder, card, inputs)
    return reply(message, wants=int(wanted))


def _has_model(folder: Path, card: Card, inputs: Inputs) -> bool:
    """Whether the last model in the folder is of this run and these data, by its report. A damaged
    report, which would be so for ever, counts as none."""
    file = folder / REPORT
    if not file.is_file():
        return False
    try:
        report = read_json(file)
    except ValueError:
        return False
    if not isinstance(report, dict):
        return False
    return report.get("run") == card.run and report.get("data") == inputs.digest()


def serve(message: Message, context: Context, make: Make) -> Message:
    """Adapt or take the server's model, and write the files to the node's state-dir."""
    served_by(message, context, make, *_task(context)).write(_state_dir(context))
    return reply(message)


def served_by(
    message: Message, context: Context, make: Make, card: Card, inputs: Inputs
) -> PersonalizationResult:
    """What the client that `make` builds receives. It holds the share of `inputs`.

    Raises ValueError for a training client whose personal part is not on this node."""
    config, arrays = unpack(message.content)
    method = str(config[METHOD])
    client = make(context, method)
    client.state = load_state(context, method, client, str(config.get(RUN_TOKEN, "")))
    if not client.share.novel and client.lacks_state(arrays):
        raise ValueError(
            f"the personal part of training client {client.client} is not on this node; a node "
            "keeps it in the state-dir that it trained with, until another run trains it"
        )
    return result_of(client, arrays, config, completed(context.run_config), card, inputs)


def reply(message: Message, **metrics: int | float | list[int] | list[float]) -> Message:
    """A reply of metrics alone: it tells the server nothing of the data."""
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
