"""Nodes, what a strategy requires of their clients, and the checks on their replies.

Replies are not trusted. Each is read, compared with what is expected, and refused with its cause:
an error, malformed values, missing or unknown names, wrong shapes or dtypes, NaN or infinity. See
`strategies.core.reply_metrics` for the numbers in a reply, `strategies.core.limits` for its
size."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from clients.core.arrays import Arrays, from_record
from clients.core.protocol import CAPABILITIES, UNLABELED
from fedapps.common.errors import bounded
from strategies.core.reply_metrics import (
    checked_values,
    checked_weight,
    foreign_numbers,
    not_finite,
    raw_values,
)

EXAMPLES = "num-examples"
NOT_FINITE = "not-finite"  # cause of refusal: an array holds NaN or infinity
LACKS = "lacks"  # cause of refusal: a client does not do what the strategy requires
SHOWN = 5  # arrays of a reply that does not fit


@dataclass(frozen=True, order=True, slots=True)
class Node:
    """A node and its client. `foreign`: the client is not of this package. Nodes sort by client."""

    client: int
    id: int
    novel: bool = False
    properties: Mapping[str, Any] = field(default_factory=dict, compare=False)
    foreign: bool = field(default=False, compare=False)

    @property
    def unlabeled(self) -> bool:
        """Whether its client takes part in training without labels."""
        return not self.novel and bool(self.properties.get(UNLABELED))


@dataclass(frozen=True)
class Update:
    """A valid reply: arrays, sample count, metrics, and the metrics of a foreign client.

    `length` is ρ ≥ 1, the norm of its change in usual ones (`strategies.core.limits`).
    `not_finite` names the numbers that were left out since they have overflowed."""

    node: Node
    arrays: Arrays
    num_examples: float
    metrics: dict[str, Any]
    foreign_metrics: Mapping[str, float | list[float]] = field(default_factory=dict)
    length: float = 1.0
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Requirement:
    """What a strategy needs of clients beyond training and scoring, as those of `method` have it.

    `behaviour` completes "clients that …". A client lists its `offers` in its answer to ``query``,
    the exchanges that it answers among them; a train reply holds the `metrics` and arrays whose
    names start with the `groups`. `fallback` is what a lenient strategy computes with clients that
    lack something; "": it cannot be lenient. `source` is the call that makes such clients."""

    method: str
    behaviour: str
    offers: tuple[str, ...] = ()
    fallback: str = ""
    metrics: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    source: str = "fedapps.client_app('{}')"

    @property
    def usage(self) -> str:
        """The call that makes such clients."""
        return self.source.format(self.method)

    @property
    def exchanges(self) -> bool:
        """Whether the clients answer more than training and evaluation messages."""
        return any("." in offer for offer in self.offers)

    def is_offered(self, properties: Mapping[str, Any]) -> bool:
        """Whether a client with these properties offers all that is needed."""
        return set(self.offers) <= set(str(properties.get(CAPABILITIES, "")).split())

    def is_met(self, arrays: Iterable[str], metrics: Iterable[str]) -> bool:
        """Whether a train reply with these names of arrays and metrics holds what is needed."""
        names = list(arrays)
        return set(self.metrics) <= set(metrics) and all(
            any(name.startswith(group) for name in names) for group in self.groups
        )

    def sentence(self, strategy: str) -> str:
        """What `strategy` needs, and the way out."""
        more = f", or pass lenient=True: it is then {self.fallback}" if self.fallback else ""
        return f"{strategy} needs clients that {self.behaviour}; use `{self.usage}`{more}"

    def relax(self, strategy: str) -> None:
        """Log what a lenient `strategy` computes. Raises ValueError if it cannot be lenient."""
        if not self.fallback:
            raise ValueError(
                f"{strategy} cannot be lenient; it needs clients that {self.behaviour}: "
                f"use `{self.usage}`"
            )
        words = "%s is lenient: with clients that do not %s it is %s"
        log(WARNING, words, strategy, self.behaviour, self.fallback)


def read_reply(
    reply: Message,
    node: Node,
    like: Arrays | None,
    train: bool,
    weighted_by: str = EXAMPLES,
    requires: Requirement | None = None,
) -> tuple[Update | None, str, str]:
    """A reply as an update, or None with the cause and the detail of its refusal.

    Its weight is its metric `weighted_by`; that of a train reply is positive. With `like`, floats
    of another width are cast to that of `like`."""
    if reply.has_error():
        return None, "missing" if is_lost(reply) else "error", error_of(reply)
    try:
        arrays: Arrays = {}
        for record in reply.content.values():
            if isinstance(record, ArrayRecord):
                arrays |= from_record(record, copy=False)
        raw = raw_values(reply.content)
        needed = requires.metrics if requires is not None else ()
        readable = {n: v for n, v in raw.items() if n in needed} if node.foreign else raw
        metrics = checked_values(readable)
        foreign = foreign_numbers(raw) if node.foreign else {}
        foreign.pop(weighted_by, None)
        weight = metrics.pop(weighted_by, raw.get(weighted_by, 0))
        num_examples = checked_weight(weight, weighted_by)
        if weighted_by == EXAMPLES:  # at most the count that the client gave when it joined
            num_examples = min(num_examples, node.properties.get(EXAMPLES, num_examples))
        if train and not num_examples:
            raise ValueError(f"{weighted_by} is 0 or missing; a client trains on some samples")
    except Exception as error:  # whatever a client's bytes raise costs that reply alone
        return None, "malformed", f"{type(error).__name__}: {error}"
    if train and requires is not None and not requires.is_met(arrays, raw):
        return None, LACKS, f"the client does not {requires.behaviour}"
    if like is not None and (wrong := _mismatch(arrays, like)):
        return None, *wrong
    lost = not_finite(raw)
    return Update(node, arrays, num_examples, metrics, foreign, not_finite=lost), "", ""


def _mismatch(arrays: Arrays, like: Arrays) -> tuple[str, str] | None:
    """Cause and detail of what differs from `like`; casts floats in place."""
    if arrays.keys() != like.keys():
        lacks, more = (_shapes(x, y) for x, y in ((like, arrays), (arrays, like)))
        return "names", f"the reply lacks {lacks}; it has {more}, which is not expected"
    other = {n: a for n, a in arrays.items() if a.shape != like[n].shape}
    if other:
        expected = _shapes({name: like[name] for name in other})
        return "shape", f"the reply has {_shapes(other)}, expected {expected}"
    for name, array in arrays.items():
        if array.dtype == (dtype := like[name].dtype):
            continue
        if not array.dtype.kind == dtype.kind == "f":
            return "dtype", f"{name} is {array.dtype}, expected {dtype}"
        with np.errstate(over="ignore"):  # infinity is refused later
            arrays[name] = array.astype(dtype)
    return None


def _shapes(arrays: Arrays, without: Iterable[str] = ()) -> str:
    """The first of the arrays' names, with their shapes."""
    left = sorted(arrays.keys() - set(without))
    words = [f"{name:.100} {arrays[name].shape}" for name in left[:SHOWN]]
    return ", ".join([*words, *["…"] * (len(left) > SHOWN)]) or "nothing"


def error_of(reply: Message) -> str:
    """The error, the cause last: engines send whole tracebacks."""
    return bounded(reply.error.reason or "") or f"error {reply.error.code}"


def is_lost(reply: Message) -> bool:
    """Whether the node is lost, or had no time to answer: the error is the grid's."""
    return reply.error.code == ErrorCode.NODE_UNAVAILABLE


def has_raised(reply: Message) -> bool:
    """Whether the node's app ran and raised. The apps of this package always answer ``query``."""
    return reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION


def most_common(nodes: Iterable[Node], *properties: str) -> tuple[Any, ...] | None:
    """The most frequent values of `properties` (ties: the least); None if no node has them all."""
    counts = Counter(
        tuple(node.properties[name] for name in properties)
        for node in nodes
        if all(name in node.properties for name in properties)
    )
    return min(counts, key=lambda values: (-counts[values], values)) if counts else None


def finite(state: Any) -> bool:
    """Whether all numbers in nested dicts, lists, tuples and sets of arrays are finite."""
    if isinstance(state, np.ndarray):
        # a finite sum of squares, in half of the time, spares the check of each number
        return (
            state.dtype.kind != "f"
            or math.isfinite(np.vdot(state, state))
            or bool(np.isfinite(state).all())
        )
    if isinstance(state, Mapping):
        return all(map(finite, state.values()))
    if isinstance(state, list | tuple | set):
        return all(map(finite, state))
    return not isinstance(state, float) or math.isfinite(state)
