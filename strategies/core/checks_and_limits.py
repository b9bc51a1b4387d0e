"""What a client's reply may hold, and how much it may count. Strategies read nothing unchecked.

Replies are not trusted. Each is read, compared with what is expected, and refused with its cause:
an error, malformed values, missing or unknown names, wrong shapes or dtypes, NaN or infinity.

A client of this package never sends a text in place of a number, or an accuracy of 7: a reply with
such a value is refused. A number that overflowed (NaN, infinity, beyond ±LARGEST) may come from
training that diverged. It alone is left out, and the round's report counts it. Texts and lists
under unknown names are left out too. The numbers of a foreign client are kept under its own names,
without a check of their range.

The influence of one client's reply is limited relative to the other clients' replies:

*Norms*: the norm of a change is limited in each group of a reply's arrays (see `group_norms`). A
change that exceeds a few times the usual norm is scaled down to this limit. A change that exceeds a
thousand times the usual norm is refused. The usual norm is the upper quartile of the clients' last
norms, but at most `MAX_QUARTILE_RATIO` lower medians. Of four clients or fewer this quartile is the
lower median. So no single client moves the usual norm, however often it is sampled. Integers and
booleans, such as counts of steps, are part of no norm.

*Sample counts* are limited to a few times the median count. A change of ρ > 1 usual norms has a
limit of 1/ρ of that, so that norm and count together stay within one limit.

*Risks and losses* are limited to a few times the upper quartile of the replies.

Replies within the limits are not changed. Among fewer than `MIN_REPLIES_FOR_NORMS` replies the
limits of norms are twice as large, and norms do not limit counts.

`Receiver` does all of this with the replies to a strategy's messages."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import replace
from functools import lru_cache
from logging import WARNING
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log

from clients.core.arrays import (
    Arrays,
    as_type,
    from_record,
    is_counter,
    is_statistic,
    num_bytes,
)
from clients.core.projections import read_projections
from clients.core.protocol import (
    AXES,
    CAPABILITIES,
    CLASS_NAMES,
    CLIENT,
    COLUMNS,
    COUNTS,
    DOMAIN,
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
    SAVE_STATE,
    SCALING,
    SECONDS,
    START_ERROR,
    SUMS,
    TRAINING_ERROR,
    UNLABELED,
    VALUE_MAGNITUDE,
    VALUE_SUMS,
)
from fedapps.common.errors import bounded, brief, cause_of
from partitions.datasets.statistics_reading import read_statistics
from partitions.shares import SUB_POPULATION
from strategies.core.privacy import Privacy, participants_are_secret
from strategies.core.replies import (
    LACKS,
    NOT_FINITE,
    Node,
    Requirement,
    Update,
    error_of,
    finite,
    is_lost,
)
from strategies.core.round_state import Round, Sent

# Checks

SHOWN = 5  # arrays that an error's text lists
LARGEST = 1e12  # number; a larger one has overflowed
MAX_VALUES = 100  # of a reply
NAME = re.compile(r"[\w.+-]{1,64}")
MAX_FOREIGN_VALUES = 1000
FOREIGN_NAME = re.compile(r"[\w.+@:/%() -]{1,64}")
# Names that evaluations compute.
PREFIXES = ("", "global-", "test-")  # of the scores of a client's evaluation
RESERVED = re.compile(r"clients|sem|half-distance|trimmed-.*|not-finite-.*|f1(-.*)?")

# Returns the checked value, or None to leave it out. Raises ValueError with what it must be.
Reader = Callable[[Any], Any]

# Limits

ABSURD = 1000.0  # ratio of a norm to the usual norm; a reply beyond it is refused
LARGEST_NORM = 1e18  # norm; larger squares overflow in float32
LARGEST_COUNT = 2**53  # integer; the mean of larger ones is not exact
REMEMBERED = 200  # clients whose last norms are stored

# Honest replies of fewer clients differ more, and each moves the usual norm more.
MIN_REPLIES_FOR_NORMS = 5
# Among fewer replies a malicious client can decide the quartile.
MIN_REPLIES_FOR_QUARTILE = 3
# Only many malicious clients can raise the upper quartile beyond this multiple of the lower median.
MAX_QUARTILE_RATIO = 4.0

# Ratio of the largest value to the upper quartile.
METRIC_LIMITS = {"risk": 2.0, LOSS: 100.0}
# Replies that affect their sender alone: no other client's model depends on them.
SEPARATE = (DOMAIN, "query.describe", "query.export")

# Causes of refusal that `on_failure` gets; a client may invent any number of them.
MAX_CAUSES = 50
NO_ARRAYS: Mapping[Node, Arrays] = {}

Norms = dict[str, float]  # by group
WIDE = {np.dtype(np.float32), np.dtype(np.float64)}  # types whose squares are summed as they are


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


def lower_quantile(values: Collection[float], share: float = 0.5) -> float:
    """The lower quantile at `share`; by default the lower median."""
    return sorted(values)[int(share * (len(values) - 1))]


def usual_size(sizes: Collection[float]) -> float:
    """The upper quartile, but at most MAX_QUARTILE_RATIO lower medians: a minority of clients
    cannot raise it far."""
    return min(lower_quantile(sizes, 0.75), MAX_QUARTILE_RATIO * lower_quantile(sizes))


def usual_count(updates: Sequence[Update], nodes: Iterable[Node]) -> float:
    """The lower median, at least 1, of the counts that the `nodes` gave when they joined.

    Without any such count it is that of the replies' counts."""
    counts: list[float] = []
    for node in nodes:
        if NUM_EXAMPLES in node.properties:
            counts.append(node.properties[NUM_EXAMPLES])
    if not counts:
        counts = [update.num_examples for update in updates]
    return max(1, lower_quantile(counts))


def bounded_weights(
    weights: Sequence[float], updates: Sequence[Update], ratio: float
) -> list[float]:
    """Limit weights other than sample counts by the norms of the updates.

    The weight of a change of ρ > `ratio` usual norms is multiplied by ratio / ρ. Ratio 0: off."""
    if not ratio:
        return list(weights)
    bounded = []
    for weight, update in zip(weights, updates, strict=True):
        bounded.append(weight * min(1.0, ratio / update.rho))
    return bounded


def bound_numbers(updates: Sequence[Update]) -> list[Update]:
    """The updates with the metrics of `METRIC_LIMITS` limited relative to the other updates."""
    limits: dict[str, float] = {}
    for name, ratio in METRIC_LIMITS.items():
        sizes = [abs(update.metrics[name]) for update in updates if name in update.metrics]
        if sizes:
            limits[name] = ratio * usual_size(sizes)
    result = []
    for update in updates:
        bounded: dict[str, float] = {}
        for name, limit in limits.items():
            # A limit of 0 is no measure: most clients sent 0.
            if name in update.metrics and 0 < limit < abs(update.metrics[name]):
                bounded[name] = math.copysign(limit, update.metrics[name])
        if bounded:
            result.append(replace(update, metrics=update.metrics | bounded))
        else:
            result.append(update)
    return result


@lru_cache(maxsize=4096)
def group_of(name: str, statistic: bool, limit_groups: tuple[str, ...]) -> str:
    """The group of an array: its kind of running statistic, its prefix before "/", or the one of
    `limit_groups` that its name starts with."""
    if statistic:
        return name.rpartition(".")[2]
    prefix, slash, _ = name.partition("/")
    if slash:
        return prefix
    for group in limit_groups:
        if name.startswith(group):
            return group
    return ""


def _start_of(name: str, array: np.ndarray, start: Arrays) -> np.ndarray | None:
    """The array of `start` that this one is measured from; None if there is none of its shape."""
    x = start.get(name)
    if x is None or x.shape != array.shape:
        return None
    return x


def group_norms(arrays: Arrays, start: Arrays, limit_groups: tuple[str, ...] = ()) -> Norms:
    """‖y − x‖ by group of the arrays y; x is 0 where `start` lacks one of the same shape.

    Integers and booleans do not count."""
    squares: Norms = {}
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is a valid distance
        for name, y in arrays.items():
            if is_counter(y):
                continue
            # The sum of many squares would overflow in float16.
            change = y if y.dtype in WIDE else y.astype(np.float64)
            x = _start_of(name, y, start)
            if x is not None:
                change = change - x
            group = group_of(name, is_statistic(name, y), limit_groups)
            squares[group] = squares.get(group, 0.0) + float(np.vdot(change, change))
    return {group: math.sqrt(square) for group, square in squares.items()}


def scaled(
    arrays: Arrays, start: Arrays, factors: Norms, limit_groups: tuple[str, ...] = ()
) -> Arrays:
    """x + factor (y − x) with the x of `group_norms` and the factor of each array's group, in the
    dtypes of y. Arrays of groups without a factor do not change, nor do integers and booleans."""
    result = dict(arrays)
    for name, y in arrays.items():
        group = group_of(name, is_statistic(name, y), limit_groups)
        if group not in factors or is_counter(y):
            continue
        x = _start_of(name, y, start)
        if x is None:
            x = np.zeros_like(y)
        result[name] = as_type(x + factors[group] * (y.astype(float) - x), y.dtype)
    return result


class Change:
    """An update and the norms of its difference from `start`, by group."""

    def __init__(self, update: Update, start: Arrays, limit_groups: tuple[str, ...] = ()) -> None:
        self.update = update
        self._start = start
        self._limit_groups = limit_groups
        self.norms = group_norms(update.arrays, start, limit_groups)

    def not_finite(self) -> str:
        """The name of an array that holds NaN or infinity; "" if there is none."""
        # An array with NaN or infinity has no finite norm, so finite norms spare a pass over the
        # arrays. A norm alone is no proof: the squares of large finite numbers overflow as well.
        if all(map(math.isfinite, self.norms.values())):
            return ""
        for name, array in self.update.arrays.items():
            if not finite(array):
                return name
        return ""

    def absurd(self, usual: Norms) -> str:
        """Why the update is refused; "" if its size is plausible."""
        for group, norm in self.norms.items():
            limit = min(ABSURD * max(1.0, usual[group]), LARGEST_NORM)
            if norm > limit:
                where = f" ({group})" if group else ""
                return f"{norm:.3g} from what was sent, > {limit:.3g}{where}"
        return self._absurd_count()

    def _absurd_count(self) -> str:
        """Why an array of integers is refused; "" if its numbers are counts."""
        for name, y in self.update.arrays.items():
            if not is_counter(y) or not y.size:
                continue
            sent = self._start.get(name)
            if sent is not None and np.array_equal(y, sent):
                continue  # the server sent these numbers itself
            largest = max(int(y.max()), -int(y.min()))
            if largest > LARGEST_COUNT:
                return f"{name} holds {largest}, > {LARGEST_COUNT}"
        return ""

    def limited(
        self,
        usual: Norms,
        norm_ratio: float,
        max_norm: float,
        max_examples: float,
        *,
        norms_limit_counts: bool = True,
    ) -> Update:
        """The update within the limits of this file's head; the same object if nothing changes.

        Each group is at most `norm_ratio` usual norms long, and all groups together at most
        `max_norm` (0: any length). The update counts with at most `max_examples` samples. With
        `norms_limit_counts` it counts with at most `max_examples` / ρ, where its longest group is
        of ρ > 1 usual norms."""
        norms: Norms = {}
        for group, norm in self.norms.items():
            norms[group] = norm
            limit = norm_ratio * usual[group]
            # Where the usual norm is 0 there is no measure, and so no limit.
            if limit > 0:
                norms[group] = min(norm, limit)
        rho = 1.0
        if norm_ratio and norms_limit_counts:
            rho = _rho(norms, usual)
        whole = math.hypot(*norms.values())
        if max_norm and whole > max_norm:
            norms = {group: norm * max_norm / whole for group, norm in norms.items()}
        factors: Norms = {}
        for group, norm in self.norms.items():
            if norms[group] < norm:
                factors[group] = norms[group] / norm
        update = self.update
        if factors:
            arrays = scaled(update.arrays, self._start, factors, self._limit_groups)
            update = replace(update, arrays=arrays)
        if rho == 1 and update.num_examples <= max_examples:
            return update
        num_examples = min(update.num_examples, max_examples / rho)
        return replace(update, num_examples=num_examples, rho=rho)


def _rho(norms: Norms, usual: Norms) -> float:
    """ρ ≥ 1, the largest norm of a group in usual norms."""
    rho = 1.0
    for group, norm in norms.items():
        if usual[group]:
            rho = max(rho, norm / usual[group])
    return rho


class NormHistory:
    """The norm of each client's last reply, by kind of message and group of arrays."""

    def __init__(self) -> None:
        self._last: dict[str, dict[int, float]] = {}

    def state(self) -> dict[str, dict[int, float]]:
        """The norms by kind and client."""
        return {kind: dict(last) for kind, last in self._last.items()}

    def load_state(self, state: Mapping[str, Mapping[int, float]]) -> None:
        """Continue from a `state`."""
        self._last = {kind: dict(last) for kind, last in state.items()}

    def usual(self, kind: str, norms: Mapping[int, Norms]) -> Norms:
        """Store these norms by client, and return the usual norm of each group.

        It is the `usual_size` of the last norms of up to REMEMBERED clients. With
        MIN_REPLIES_FOR_QUARTILE or more replies it is that of the replies if this is larger."""
        by_group: dict[str, dict[int, float]] = defaultdict(dict)
        for client, client_norms in norms.items():
            for group, norm in client_norms.items():
                by_group[group][client] = norm
        usual: Norms = {}
        for group in sorted(by_group):
            usual[group] = self._usual(f"{kind} {group}", by_group[group])
        return usual

    def _usual(self, key: str, norms: Mapping[int, float]) -> float:
        last = self._last.setdefault(key, {})
        for client, norm in norms.items():
            last.pop(client, None)  # a client that replies again becomes the most recent
            last[client] = min(norm, LARGEST_NORM)
        while len(last) > REMEMBERED:
            least_recent = next(iter(last))
            del last[least_recent]
        usual = usual_size(last.values())
        if len(norms) >= MIN_REPLIES_FOR_QUARTILE:
            usual = max(usual, usual_size(norms.values()))
        return usual


class ReceivingStrategy(Protocol):
    """What a receiver reads of its strategy."""

    timeout: float
    nodes: MutableSequence[Node]
    now: Round
    requires: Requirement | None
    privacy: Privacy | None
    runs_own_loop: bool
    limit_groups: tuple[str, ...]
    protect: bool
    max_update_norm: float
    max_update_ratio: float
    max_examples_ratio: float
    weighted_by_key: str
    on_failure: Callable[[str], None] | None


class Receiver:
    """Reads the replies to a strategy's messages.

    Bytes and refused replies are counted in the strategy's present round."""

    def __init__(self, strategy: ReceivingStrategy) -> None:
        self._strategy = strategy
        self.sizes = NormHistory()
        self._causes: set[str] = set()  # passed to `on_failure`

    def receive(
        self,
        sent: Sent,
        replies: Iterable[Message],
        like: Mapping[Node, Arrays] = NO_ARRAYS,
        starts: Mapping[Node, Arrays] = NO_ARRAYS,
        *,
        train: bool = False,
    ) -> list[Update]:
        """The valid replies to the messages `sent`, sorted by client.

        Other replies are counted and logged. `replies` may be an iterator: each is read before the
        next one is taken. `like` gives, by node, the arrays whose names, shapes and dtypes a reply
        must have; `starts` those that its change is measured from, where that is not from zero.
        `train`: a reply needs a positive weight and what the strategy requires."""
        kind = sent[0][0].metadata.message_type if sent else ""
        changes, unanswered = self.read(sent, replies, like, starts, train=train)
        for node in unanswered:
            self.drop_missing(node)
        return self.limited(kind, sorted(changes, key=lambda change: change.update.node))

    def read(
        self,
        sent: Sent,
        replies: Iterable[Message],
        like: Mapping[Node, Arrays],
        starts: Mapping[Node, Arrays],
        *,
        train: bool = False,
    ) -> tuple[list[Change], list[Node]]:
        """The valid replies in the order of their arrival, and the nodes that did not answer.

        The arguments are those of `receive`; the replies are not limited yet."""
        strategy = self._strategy
        nodes = {message.metadata.message_id: node for message, node in sent}
        changes: list[Change] = []
        for reply in replies:
            # Removed, since a second reply to the same message does not count.
            node = nodes.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            start = starts.get(node, {})
            change = self._read(reply, node, like.get(node), start, train=train)
            if change is not None:
                changes.append(change)
                strategy.now.bytes["up"] += num_bytes(change.update.arrays.values())
        return changes, list(nodes.values())

    def _read(
        self, reply: Message, node: Node, like: Arrays | None, start: Arrays, *, train: bool
    ) -> Change | None:
        """The reply of a node, and its change from `start`; None if it is refused."""
        strategy = self._strategy
        update, cause, detail = read_reply(
            reply, node, like, train, strategy.weighted_by_key, strategy.requires
        )
        if update is None:
            self.drop(node, cause, detail)
            return None
        if train and strategy.privacy is not None:
            not_private = strategy.privacy.exposed(update)
            if not_private:
                self.drop(node, "not-private", not_private)
                return None
        change = Change(update, start, strategy.limit_groups)
        name = change.not_finite()
        if name:
            self.drop(node, NOT_FINITE, f"{name} holds NaN or infinity")
            return None
        return change

    def limited(self, kind: str, changes: list[Change]) -> list[Update]:
        """The updates of plausible size, within the limits of `strategies.core.checks_and_limits`.

        `changes` are sorted by client, so that sums are the same on every engine."""
        strategy = self._strategy
        updates = [change.update for change in changes]
        # Where participants are secret, usual sizes would reveal something about them; there the
        # privacy clips every update.
        hidden = participants_are_secret(strategy.privacy)
        if hidden or not updates or kind == SAVE_STATE:
            return updates
        if strategy.protect:
            for change, update in zip(changes, bound_numbers(updates), strict=True):
                change.update = update
        # Clients without labels change less than others, so their norms are no measure for them.
        labeled = [change for change in changes if not change.update.node.unlabeled]
        measured = labeled or changes
        # Nor is the answer of a client that has nothing to add to a sum.
        if kind.startswith("query."):
            measured = [change for change in measured if any(change.norms.values())] or measured
        norms = {change.update.node.client: change.norms for change in measured}
        usual = self.sizes.usual(kind, norms)

        max_examples = self._max_examples(kind, updates)
        enough_replies = len(changes) >= MIN_REPLIES_FOR_NORMS
        norm_ratio = self._norm_ratio(kind)
        if not enough_replies:
            norm_ratio *= 2
        max_norm = strategy.max_update_norm if kind == "train" else 0.0
        result = []
        for change in changes:
            absurd = change.absurd(usual)
            if absurd:
                self.drop(change.update.node, "absurd", absurd)
                continue
            limited = change.limited(
                usual, norm_ratio, max_norm, max_examples, norms_limit_counts=enough_replies
            )
            if limited.arrays is not change.update.arrays:
                strategy.now.clipped += 1
            if limited.num_examples != change.update.num_examples:
                strategy.now.recounted += 1
            result.append(limited)
        return result

    def _max_examples(self, kind: str, updates: Sequence[Update]) -> float:
        """The sample count that a reply counts with at most; infinity if it is not limited."""
        strategy = self._strategy
        if kind == "evaluate" or not strategy.max_examples_ratio:
            return math.inf
        # The count that a client gave when it joined is a measure only if sample counts are the
        # weights.
        joined: list[Node] = []
        if strategy.weighted_by_key == NUM_EXAMPLES:
            joined = [node for node in strategy.nodes if not node.novel]
        return strategy.max_examples_ratio * usual_count(updates, joined)

    def _norm_ratio(self, kind: str) -> float:
        """The limit of a group's norm, in usual norms; 0 if it is not limited."""
        strategy = self._strategy
        # Inside a Flower privacy wrapper the wrapper clips.
        if not strategy.runs_own_loop or kind == "evaluate" or kind in SEPARATE:
            return 0.0
        return strategy.max_update_ratio

    def drop_missing(self, node: Node) -> None:
        """Count and log a reply that did not come in time."""
        self.drop(node, "missing", f"none within {self._strategy.timeout} s")

    def drop(self, node: Node, cause: str, detail: str) -> None:
        """Count and log a reply that is not used.

        Each new cause is also passed to the strategy's `on_failure`, with its whole detail."""
        strategy = self._strategy
        detail = bounded(detail)
        strategy.now.dropped[cause] += 1
        client = "a client"
        if not participants_are_secret(strategy.privacy):
            client = f"client {node.client}, round {strategy.now.number}"
        if not strategy.now.failure:
            strategy.now.failure = f"{client}: {cause}: {brief(detail)}"
        key = f"{cause}\n{cause_of(detail)}"
        text = f"{client}: {cause}\n{detail}"
        strategy.now.causes.setdefault(key, text)
        is_new = self.pass_cause(key, text)
        shown = detail if is_new else brief(detail)
        log(WARNING, "%s: reply dropped, %s: %s", client, cause, shown)

    def pass_cause(self, key: str, text: str) -> bool:
        """Pass the `text` of a cause to the strategy's `on_failure`, unless one of this `key` was
        passed before, or too many were. Returns whether it is new."""
        if key in self._causes or len(self._causes) == MAX_CAUSES:
            return False
        self._causes.add(key)
        if self._strategy.on_failure is not None:
            self._strategy.on_failure(text)
        return True
