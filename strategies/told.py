"""What clients tell in words and numbers, typed and bounded: strategies read nothing else.

Of a client that is not ours any number is its own business, whatever its name. Of ours a text where
a number belongs, an accuracy of 7: no honest client tells such, and it costs the whole reply. A
number that overflowed (NaN, infinity, beyond ±LARGEST) may come from honest training that diverged:
it alone is left out, as are texts and lists under names that nobody here knows."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from clients.protocol import OFFERS

LARGEST = 1e12
MOST = 100  # values of a reply
NAME = re.compile(r"[\w.+-]{1,64}")
MOST_FOREIGN = 1000
FOREIGN = re.compile(r"[\w.+@:/%() -]{1,64}")
OURS = re.compile(r"clients|sem|half-distance|f1(-.*)?")  # what evaluations derive themselves

Read = Callable[[Any], Any]  # raises ValueError; None: left out


def whole(low: int, high: int) -> Read:
    """A whole number in [low, high]."""

    def read(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return read


def real(low: float = -math.inf, high: float = math.inf) -> Read:
    """A number in [low, high]; None if it overflowed."""

    def read(value: Any) -> float | int | None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError("must be a number")
        if not -LARGEST <= value <= LARGEST:
            return None
        if not low <= value <= high:
            raise ValueError(f"must be a number from {low} to {high}")
        return value

    return read


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def word(value: Any) -> str:
    """A short text in one line."""
    if not isinstance(value, str) or len(value) > 200 or not (value.isprintable()):
        raise ValueError("must be a text of one line, at most 200 characters long")
    return value


def counts(value: Any) -> list[int]:
    """How many samples of each pair (label, prediction): TN, FP, FN, TP."""
    if not isinstance(value, list) or len(value) != 4:
        raise ValueError("must be a list of four counts")
    return [SAMPLES(one) for one in value]


SAMPLES = whole(0, 10**9)
KNOWN: dict[str, Read] = {
    OFFERS: word,
    "error": word,
    "client": whole(0, 2**64 - 1),
    "novel": flag,
    "model": word,
    "num-examples": SAMPLES,
    "input-size": whole(1, 10**9),
    "public-samples": whole(1, 10**9),
    "classes": whole(1, 10**6),
    "prototype": whole(0, 10**6),
    "sub-population": whole(0, 10**6),
    "head": whole(0, 10**6),
    "counts": counts,
    "loss": real(),
    "risk": real(),
    "accuracy": real(0, 1),
    "test-accuracy": real(0, 1),
    "training-error": real(0, 1),
    "test-accuracy-examples": SAMPLES,
    "training-error-examples": SAMPLES,
    "dp-sigma": real(0),
}


def told(content: RecordDict) -> dict[str, Any]:
    """All that the config and metric records hold, as it was told."""
    values: dict[str, Any] = {}
    for record in content.values():
        if isinstance(record, ConfigRecord | MetricRecord):
            values.update(record.items())
    return values


def numbers(values: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """The numbers, and the lists of numbers, that a client that is not ours tells under names of
    its own; what is something else, or has overflowed, is left out."""
    found: dict[str, float | list[float]] = {}
    for name, value in values.items():
        if not FOREIGN.fullmatch(name) or len(found) == MOST_FOREIGN:
            continue
        try:
            read = [real()(one) for one in (value if isinstance(value, list) else [value])]
        except ValueError:
            continue
        if None not in read:
            found[name] = read if isinstance(value, list) else read[0]
    return found


def weight(value: Any, name: str) -> float:
    """What a client's reply weighs. Raises ValueError for what is no weight."""
    try:
        found = real(0, 10**9)(value)
    except ValueError as error:
        raise ValueError(f"{name} is {value!r:.80}; it {error}") from error
    if found is None:
        raise ValueError(f"{name} is {value!r:.80}; it has overflowed")
    return float(found) if isinstance(value, float) else int(value)


def typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as this file says. Raises ValueError naming the value and what it must be."""
    if len(values) > MOST:
        raise ValueError(f"{len(values)} values are told; the most is {MOST}")
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in KNOWN:
            try:
                one = KNOWN[name](value)
            except ValueError as error:
                raise ValueError(f"{name} is {value!r:.80}; it {error}") from error
        else:
            one = _stranger(name, value)
        if one is not None:
            found[name] = one
    return found


def _stranger(name: str, value: Any) -> float | int | None:
    """A number under a name of the client's own; None if it is none, or if the name would be one of
    ours in a summary, which writes "-" as "_"."""
    ours = name.replace("_", "-")
    if not NAME.fullmatch(name) or ours in KNOWN or OURS.fullmatch(ours):
        return None
    try:
        return real()(value)
    except ValueError:
        return None
