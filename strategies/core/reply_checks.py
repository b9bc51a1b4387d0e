"""What a client's reply may hold. Strategies read nothing unchecked.

Replies are not trusted. Each is read, compared with what is expected, and refused with its cause:
an error, malformed values, missing or unknown names, wrong shapes or dtypes, NaN or infinity.

A client of this package never sends a text in place of a number, or an accuracy of 7: a reply with
such a value is refused. A number that overflowed (NaN, infinity, beyond ±LARGEST) may come from
training that diverged. It alone is left out, and the round's report counts it. Texts and lists
under unknown names are left out too. The numbers of a foreign client are kept under its own names,
without a check of their range."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from clients.core.arrays import (
    Arrays,
    from_record,
)
from clients.core.projections import read_projections
from clients.core.protocol import (
    AXES,
    CAPABILITIES,
    CLASS_NAMES,
    CLIENT,
    COLUMNS,
    COUNTS,
    FROZEN,
    HEAD,
    INPUT_SIZE,
    LOSS,
    MAGNITUDE,
    MAX_REASON,
    MODEL,
    NOVEL,
    NUM_EXAMPLES,
    PUBLIC,
    SCALING,
    SECONDS,
    START_ERROR,
    SUMS,
    TRAINING_ERROR,
    UNLABELED,
    VALUE_MAGNITUDE,
    VALUE_SUMS,
)
from partitions.datasets.statistics_reading import read_statistics
from partitions.shares import SUB_POPULATION
from strategies.core.replies import (
    LACKS,
    Node,
    Requirement,
    Update,
    error_of,
    is_lost,
)

SHOWN = 5  # arrays that an error's text lists
LARGEST = 1e12  # number; a larger one has overflowed
MAX_VALUES = 100  # of a reply
NAME = re.compile(r"[\w.+-]{1,64}")
MAX_FOREIGN_VALUES = 1000
FOREIGN_NAME = re.compile(r"[\w.+@:/%() -]{1,64}")
FOREIGN_NAMES = "at most 64 letters, digits, spaces and characters of _.+@:/%()-"
# Names that evaluations compute.
PREFIXES = ("", "global-", "test-")  # of the scores of a client's evaluation
RESERVED = re.compile(r"clients|sem|half-distance|trimmed-.*|not-finite-.*|f1(-.*)?")

# Returns the checked value, or None to leave it out. Raises ValueError with what it must be.
Reader = Callable[[Any], Any]


def integer(low: int, high: int) -> Reader:
    """A whole number in [low, high]."""

    def read(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return read


def number(low: float = -math.inf, high: float = math.inf) -> Reader:
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


def boolean(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def text(length: int = 200) -> Reader:
    """A reader of one line of at most `length` characters."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > length or not value.isprintable():
            raise ValueError(f"must be a text of one line, at most {length} characters long")
        return value

    return read


def counts(value: Any) -> list[int]:
    """Sample counts by (label, prediction): TN, FP, FN, TP."""
    if not isinstance(value, list) or len(value) != 4:
        raise ValueError("must be a list of four counts")
    return [SAMPLES(count) for count in value]


def sums(value: Any) -> list[float]:
    """Four finite sums for each of a client's values: n, Σ y, Σ y² and Σ (z − y)²."""
    if not isinstance(value, list) or not value or len(value) % 4 or len(value) > 4 * MAX_VALUES:
        raise ValueError(f"must be a list of four sums for each of at most {MAX_VALUES} values")
    read = number()
    numbers = [read(item) for item in value]
    if None in numbers:
        raise ValueError("must be finite numbers; training diverged: lower lr")
    return [float(item) for item in numbers]


def projections_text(value: Any) -> str:
    """Projections of public samples or of frozen parameters, see `clients.core.projections`."""
    read_projections(value)
    return str(value)


def lengths(value: Any) -> str:
    """The lengths of two or three axes, as words."""
    words = str(value)[:100].split()
    if len(words) not in (2, 3) or not all(word.isdecimal() for word in words):
        raise ValueError("must be two or three whole numbers")
    return " ".join(words)


SAMPLES = integer(0, 10**9)
READERS: dict[str, Reader] = {
    CAPABILITIES: text(),
    START_ERROR: text(MAX_REASON),
    CLIENT: integer(0, 2**64 - 1),
    NOVEL: boolean,
    UNLABELED: boolean,
    MODEL: text(),
    NUM_EXAMPLES: SAMPLES,
    INPUT_SIZE: integer(1, 10**9),
    COLUMNS: text(),
    CLASS_NAMES: text(),
    SCALING: text(),
    PUBLIC: projections_text,
    FROZEN: projections_text,
    AXES: lengths,
    MAGNITUDE: integer(-2000, 2000),
    VALUE_MAGNITUDE: integer(-2000, 2000),
    "public-samples": integer(1, 10**9),
    "classes": integer(1, 10**6),
    "prototype": integer(0, 10**6),
    SUB_POPULATION: integer(0, 10**6),
    HEAD: integer(0, 10**6),
    COUNTS: counts,
    LOSS: number(),
    "risk": number(),
    "macro-f1": number(0, 1),
    "micro-f1": number(0, 1),
    "global-macro-f1": number(0, 1),
    "mae": number(0),
    "r2": number(high=1),
    TRAINING_ERROR: number(0, 1),
    **{f"{prefix}accuracy": number(0, 1) for prefix in PREFIXES},
    **{f"{prefix}rmse": number(0) for prefix in PREFIXES},
    **{f"{prefix}{VALUE_SUMS}": sums for prefix in PREFIXES},
    "test-accuracy-examples": SAMPLES,
    "test-rmse-examples": SAMPLES,
    f"{TRAINING_ERROR}-examples": SAMPLES,
    SUMS: read_statistics,
    "dp-sigma": number(0),
    SECONDS: number(0),
}


def read_reply(
    reply: Message,
    node: Node,
    like: Arrays | None,
    train: bool,
    weighted_by: str = NUM_EXAMPLES,
    requires: Requirement | None = None,
) -> tuple[Update | None, str, str]:
    """A reply as an update and two empty texts; or None, the cause and the detail of its refusal.

    The update's weight is the reply's metric `weighted_by`; in a train reply it must be positive.
    With `like` the arrays must have its names, shapes and dtypes; floats of another width are cast
    to the dtype in `like`."""
    if reply.has_error():
        cause = "missing" if is_lost(reply) else "error"
        return None, cause, error_of(reply)
    try:
        update = _unchecked_update(reply, node, weighted_by, requires)
        if train and not update.num_examples:
            raise ValueError(f"{weighted_by} is 0 or missing; a client trains on some samples")
    except Exception as error:  # whatever a client's bytes raise, only its reply is lost
        return None, "malformed", f"{type(error).__name__}: {error}"
    if train and requires is not None:
        names_of_values = raw_values(reply.content)
        if not requires.is_met(update.arrays, names_of_values):
            return None, LACKS, f"the client does not {requires.behaviour}"
    if like is not None:
        mismatch = _mismatch(update.arrays, like)
        if mismatch is not None:
            return None, *mismatch
    return update, "", ""


def _unchecked_update(
    reply: Message, node: Node, weighted_by: str, requires: Requirement | None
) -> Update:
    """The reply's arrays and checked numbers; its arrays are not compared with anything yet.

    Raises ValueError for malformed values."""
    arrays: Arrays = {}
    for record in reply.content.values():
        if isinstance(record, ArrayRecord):
            arrays |= from_record(record, copy=False)
    values = raw_values(reply.content)
    foreign_metrics: dict[str, float | list[float]] = {}
    if node.foreign:
        # Names of a foreign client mean something else here, except those that the strategy needs.
        needed = requires.metrics if requires is not None else ()
        metrics = checked_values({name: v for name, v in values.items() if name in needed})
        foreign_metrics = foreign_numbers(values)
        foreign_metrics.pop(weighted_by, None)
    else:
        metrics = checked_values(values)
    weight = metrics.pop(weighted_by, values.get(weighted_by, 0))
    num_examples = checked_weight(weight, weighted_by)
    if weighted_by == NUM_EXAMPLES:
        # At most the count that the client gave when it joined.
        num_examples = min(num_examples, node.properties.get(NUM_EXAMPLES, num_examples))
    return Update(
        node, arrays, num_examples, metrics, foreign_metrics, not_finite=not_finite(values)
    )


def _mismatch(arrays: Arrays, like: Arrays) -> tuple[str, str] | None:
    """Cause and detail of the first difference from `like`; None if there is none.

    Casts floats of another width in place."""
    if arrays.keys() != like.keys():
        lacking = _shapes(like, arrays)
        unexpected = _shapes(arrays, like)
        return (
            "names",
            f"the reply lacks {lacking}; it has {unexpected}, which is not expected",
        )
    misshapen = {name: a for name, a in arrays.items() if a.shape != like[name].shape}
    if misshapen:
        expected = _shapes({name: like[name] for name in misshapen})
        return "shape", f"the reply has {_shapes(misshapen)}, expected {expected}"
    for name, array in arrays.items():
        dtype = like[name].dtype
        if array.dtype == dtype:
            continue
        if not array.dtype.kind == dtype.kind == "f":
            return "dtype", f"{name} is {array.dtype}, expected {dtype}"
        with np.errstate(over="ignore"):  # infinity is refused later
            arrays[name] = array.astype(dtype)
    return None


def _shapes(arrays: Arrays, without: Iterable[str] = ()) -> str:
    """The first names of the arrays, with their shapes, leaving out the names in `without`."""
    names = sorted(arrays.keys() - set(without))
    if not names:
        return "nothing"
    words = [f"{name:.100} {arrays[name].shape}" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        words.append("…")
    return ", ".join(words)


def raw_values(content: RecordDict) -> dict[str, Any]:
    """All values of the config and metric records, unchecked."""
    values: dict[str, Any] = {}
    for record in content.values():
        if isinstance(record, ConfigRecord | MetricRecord):
            values.update(record.items())
    return values


def foreign_numbers(values: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """The finite numbers, and lists of them, of a foreign client; other values are left out."""
    read = number()
    kept: dict[str, float | list[float]] = {}
    for name, value in values.items():
        if not FOREIGN_NAME.fullmatch(name) or len(kept) == MAX_FOREIGN_VALUES:
            continue
        items = value if isinstance(value, list) else [value]
        try:
            numbers = [read(item) for item in items]
        except ValueError:
            continue
        if None in numbers:  # one of them overflowed
            continue
        kept[name] = numbers if isinstance(value, list) else numbers[0]
    return kept


def unusable_names(values: Mapping[str, Any]) -> list[str]:
    """The names of a foreign client's numbers that `foreign_numbers` leaves out for their names."""
    names: list[str] = []
    for name, value in values.items():
        is_number = bool(foreign_numbers({"number": value}))
        if is_number and not FOREIGN_NAME.fullmatch(name):
            names.append(name)
    return names


def not_finite(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of numbers that overflowed, and of lists with such a number.

    `checked_values` and `foreign_numbers` leave them out."""
    names: list[str] = []
    for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        overflowed = False
        for number in numbers:
            # NaN compares as neither smaller nor larger.
            if isinstance(number, float) and not -LARGEST <= number <= LARGEST:
                overflowed = True
        if overflowed and FOREIGN_NAME.fullmatch(name) and len(names) < MAX_VALUES:
            names.append(name)
    return tuple(names)


def checked_weight(value: Any, name: str) -> float:
    """The weight of a reply in means. Raises ValueError unless it is a number in [0, 10⁹]."""
    read = _read(number(0, 10**9), name, value)
    if read is None:
        raise ValueError(f"{name} is {value!r:.80}; it has overflowed")
    return float(read) if isinstance(value, float) else int(value)


def checked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a reply of this package's client; see the head of this file.

    Raises ValueError with the value and its range, or if there are too many values."""
    if len(values) > MAX_VALUES:
        raise ValueError(f"the reply has {len(values)} values; the most is {MAX_VALUES}")
    checked: dict[str, Any] = {}
    for name, value in values.items():
        reader = READERS.get(name)
        read = _unknown(name, value) if reader is None else _read(reader, name, value)
        if read is not None:
            checked[name] = read
    return checked


def is_reserved(name: str) -> bool:
    """Whether a client's own number cannot have this name: it has another meaning, or characters
    that names do not have."""
    plain = name.replace("_", "-")  # earlier summaries wrote "-" as "_": both are the same name
    return not NAME.fullmatch(name) or plain in READERS or bool(RESERVED.fullmatch(plain))


def _read(reader: Reader, name: str, value: Any) -> Any:
    try:
        return reader(value)
    except ValueError as error:
        raise ValueError(f"{name} is {value!r:.80}; it {error}") from error


def _unknown(name: str, value: Any) -> float | int | None:
    """A number under a name without a reader; None for other values and for reserved names."""
    if is_reserved(name):
        return None
    try:
        return number()(value)
    except ValueError:
        return None
