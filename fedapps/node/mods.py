"""Flower's mods, which change a node's messages, around the clients of this package."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from flwr.app import Context, Message
from flwr.app.error import Error
from flwr.clientapp.typing import ClientAppCallable, Mod

from clients.core.privacy import settings_of
from fedapps.common.errors import Refusal

FORMER = "flwr.client.mod"  # mods that read the messages of Flower's former API
SECURE_AGGREGATION = f"{FORMER}.secure_aggregation"
CLIPPING = "flwr.clientapp.mod.centraldp_mods"
PROTECTING = (CLIPPING, "flwr.clientapp.mod.localdp_mod")
# Key of a train message's config, by which Flower's wrappers ask the clients to clip.
CLIPPING_NORM = "clipping_norm"
TRAIN = "train"


def checked_mods(mods: Sequence[Mod] | None, exchanges: Sequence[str] = ()) -> list[Mod]:
    """The mods as a ClientApp takes them, the first one outermost.

    Flower's clipping and noise, which take a reply for a trained model, run around train messages
    alone; others run around every message. Without one that may clip, a server that asks for
    clipped updates is refused. `exchanges` are further messages that the client answers. Raises
    ValueError for a mod that could not do its work."""
    if mods is None:
        mods = []
    if callable(mods) or not isinstance(mods, Sequence):
        raise ValueError(f"mods= is {mods!r:.200}; it must be a list of mods")
    checked = [_answered(_checked(mod, exchanges)) for mod in mods]
    if not any(map(_may_clip, mods)):
        checked.append(_refusing_to_clip)
    return checked


def _may_clip(mod: Any) -> bool:
    """Whether the mod is one of Flower's that clip, or of another package, which may clip."""
    _, module = _name_and_module(mod)
    return module == CLIPPING or not module.startswith("flwr.")


def _refusing_to_clip(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Raise Refusal for a train message whose server relies on clipped updates: its noise would
    protect nobody."""
    settings = settings_of(message)
    if message.metadata.message_type == TRAIN and CLIPPING_NORM in settings:
        raise Refusal(
            f"the server asks for updates clipped to norm {settings[CLIPPING_NORM]:g}, and no mod "
            "of this app clips; give mods=[fixedclipping_mod] of flwr.clientapp.mod, or "
            "adaptiveclipping_mod where the server's wrapper is adaptive"
        )
    return call_next(message, context)


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
