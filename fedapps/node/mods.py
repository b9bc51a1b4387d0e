"""Flower's mods, which change a node's messages, around the clients of this package."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from flwr.app import Context, Message
from flwr.app.error import Error
from flwr.clientapp.typing import ClientAppCallable, Mod

FORMER = "flwr.client.mod"  # mods that read the messages of Flower's former API
SECURE_AGGREGATION = f"{FORMER}.secure_aggregation"
PROTECTING = ("flwr.clientapp.mod.centraldp_mods", "flwr.clientapp.mod.localdp_mod")
TRAIN = "train"


def checked_mods(mods: Sequence[Mod] | None, exchanges: Sequence[str] = ()) -> list[Mod]:
    """The mods as a ClientApp takes them, the first one outermost.

    Flower's clipping and noise, which take a reply for a trained model, run around train messages
    alone; others run around every message. `exchanges` are further messages that the client
    answers. Raises ValueError for a mod that could not do its work."""
    if mods is None:
        return []
    if callable(mods) or not isinstance(mods, Sequence):
        raise ValueError(f"mods= is {mods!r:.200}; it must be a list of mods")
    return [_answered(_checked(mod, exchanges)) for mod in mods]


def _checked(mod: Any, exchanges: Sequence[str]) -> Mod:
    name, module = _name_and_module(mod)
    if isinstance(mod, type) or not callable(mod):
        raise ValueError(
            f"mods= has {mod!r:.200}; a mod is called with a message, a context and what comes "
            "next: give a function or an object, such as LocalDpMod(…)"
        )
    if module.startswith(SECURE_AGGREGATION):
        raise ValueError(
            f"{name} answers the messages of Flower's SecAgg+ workflow, which no strategy of this "
            "package sends, and refuses all others; leave it out, and note that the server then "
            "sees each client's model; dp=local hides it by noise"
        )
    if module.startswith(FORMER):
        raise ValueError(
            f"{name} of {FORMER} reads messages of Flower's former API; import {name} from "
            "flwr.clientapp.mod"
        )
    if module not in PROTECTING:
        return mod
    if exchanges:
        raise ValueError(
            f"{name} protects the replies to train messages, and this method's clients also "
            f"answer {', '.join(exchanges)}, which would be sent in the clear; choose a method "
            "whose clients only train, such as fedavg"
        )
    return partial(_around_training, mod)


def _name_and_module(mod: Any) -> tuple[str, str]:
    """What a mod is called, and where it is defined; of an object its class."""
    while isinstance(mod, partial):
        mod = mod.func
    named = mod if hasattr(mod, "__name__") else type(mod)
    return str(named.__name__), str(named.__module__)


def _around_training(
    mod: Mod, message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """The mod around a train message; other messages pass."""
    if message.metadata.message_type != TRAIN:
        return call_next(message, context)
    return mod(message, context, call_next)


def _answered(mod: Mod) -> Mod:
    """The mod, whose reply is one to the message: Flower's mods address an error about a client's
    reply to that reply, so that the server would wait for an answer until its timeout."""

    def answering(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = mod(message, context, call_next)
        asked = message.metadata.message_id
        if not reply.has_error() or reply.metadata.reply_to_message_id == asked:
            return reply
        return Message(Error(reply.error.code, reply.error.reason), reply_to=message)

    return answering
