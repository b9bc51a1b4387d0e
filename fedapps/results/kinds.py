"""Of what kind the values in a run's files are: what another program wrote there is told apart."""

from collections.abc import Callable
from typing import Any

Kind = Callable[[Any], bool]


def number(value: Any) -> bool:
    """A number that is no boolean, and that a float holds exactly if it is whole."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= 2**53)


def whole(value: Any) -> bool:
    """A whole number from 0 that arrays can hold."""
    return type(value) is int and 0 <= value < 2**63


def anything(value: Any) -> bool:
    """Whatever it is."""
    return True


def finite(value: Any) -> bool:
    """A number that is neither NaN nor infinite."""
    return number(value) and abs(value) < float("inf")


def positive(value: Any) -> bool:
    """A finite number above 0."""
    return finite(value) and value > 0


def count(value: Any) -> bool:
    """A whole number from 1."""
    return whole(value) and value > 0


def text(value: Any) -> bool:
    """A text."""
    return isinstance(value, str)


def role(value: Any) -> bool:
    """Of a client."""
    return value in ("train", "novel")


def maybe(kind: Kind) -> Kind:
    """That, or null."""
    return lambda value: value is None or kind(value)


def either(*kinds: Kind) -> Kind:
    """One of them."""
    return lambda value: any(kind(value) for kind in kinds)


def list_of(kind: Kind) -> Kind:
    """A list of such values, one at least."""
    return lambda value: isinstance(value, list) and bool(value) and all(map(kind, value))


def table(kind: Kind) -> Kind:
    """A table of such values under whatever names."""
    return lambda value: isinstance(value, dict) and all(map(kind, value.values()))


def record(needed: dict[str, Kind], **known: Kind) -> Kind:
    """A table that has the `needed` names, and perhaps `known` ones, of their kinds."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or not needed.keys() <= value.keys():
            return False
        kinds = needed | known
        return all(kinds[name](one) for name, one in value.items() if name in kinds)

    return fits


RATE = maybe(number)
GROUP = table(RATE)  # of accuracies and the like, of training or of novel clients


def scored(value: Any) -> bool:
    """A group that tells its accuracy."""
    return GROUP(value) and "accuracy" in value


CLIENTS = table(record({"role": role, "accuracy": RATE, "examples": whole}))
RESULT = record({}, train=maybe(GROUP), novel=maybe(GROUP), per_client=CLIENTS)
SUMMARY = record(
    {
        "train": scored,
        "novel": maybe(scored),
        "megabytes_per_client_round": record({"down": RATE, "up": RATE}),
        "seconds": maybe(number),
        "rounds": whole,
    },
    per_client=CLIENTS,
    last=RESULT,
    best_round=whole,
    dropped_replies=maybe(whole),
    privacy=record({"epsilon": number, "delta": number, "generator": text, "terms": text}),
)
FAILURE = record({"error": text})
ROUND = record(
    {"round": whole},
    evaluation=GROUP,
    dropped=table(whole),
    phases=table(number),
)
CONFIG = record(
    dict.fromkeys(("method", "dataset", "partition"), text)
    | {"seed": whole, "num-clients": whole, "train-fraction": number},
    versions=table(text),
)
