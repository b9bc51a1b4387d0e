"""Nodes, what a strategy requires of their clients, and their replies.

`strategies.core.reply_checks` checks a reply, `strategies.core.limits` limits its influence."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from clients.core.arrays import Arrays
from clients.core.protocol import CAPABILITIES, UNLABELED
from fedapps.common.errors import bounded

NOT_FINITE = "not-finite"  # cause of refusal: an array holds NaN or infinity
DIFFERS = "columns"  # cause of refusal: a client has other columns than most
OTHER_PUBLIC = "public-samples"  # cause of refusal: a client has other public samples than most
OTHER_CLASSES = "classes"  # cause of refusal: a client has other classes than most
OTHER_FROZEN = "frozen"  # cause of refusal: a client has other frozen parameters than most
LACKS = "lacks"  # cause of refusal: a client does not do what the strategy requires


@dataclass(frozen=True, order=True, slots=True)
class Node:
    """A node and its client; nodes sort by client id.

    `client` is the client's id, `id` that of Flower's node. `properties` are the values of the
    node's answer to ``query``. `foreign`: the client is not of this package."""

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

    `rho` is ρ ≥ 1, the norm of its change in usual norms (`strategies.core.limits`).
    `not_finite` names the numbers that were left out because they overflowed."""

    node: Node
    arrays: Arrays
    num_examples: float
    metrics: dict[str, Any]
    foreign_metrics: Mapping[str, float | list[float]] = field(default_factory=dict)
    rho: float = 1.0
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Requirement:
    """What a strategy needs of clients beyond training and scoring.

    - `method`: a method whose clients meet the requirement.
    - `behaviour`: completes the sentence "clients that …".
    - `offers`: what a client must list in its answer to ``query``; exchanges are among them.
    - `metrics`: names of metrics that every train reply must hold.
    - `groups`: for each, a train reply must hold an array whose name starts with it.
    - `fallback`: what a lenient strategy computes with clients that lack something; "": it cannot
      be lenient.
    - `source`: the call that makes such clients."""

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
    def needs_exchanges(self) -> bool:
        """Whether the clients answer more than training and evaluation messages."""
        return any("." in offer for offer in self.offers)

    def is_offered(self, properties: Mapping[str, Any]) -> bool:
        """Whether a client with these properties offers all that is needed."""
        capabilities = str(properties.get(CAPABILITIES, "")).split()
        return set(self.offers) <= set(capabilities)

    def is_met(self, arrays: Iterable[str], metrics: Iterable[str]) -> bool:
        """Whether a train reply with these names of arrays and metrics holds what is needed."""
        if not set(self.metrics) <= set(metrics):
            return False
        names = list(arrays)

        def is_held(group: str) -> bool:
            return any(name.startswith(group) for name in names)

        return all(map(is_held, self.groups))

    def sentence(self, strategy: str) -> str:
        """An error's text: what `strategy` needs, and the call that makes such clients."""
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


def error_of(reply: Message) -> str:
    """The error's text, shortened from its start: engines send tracebacks, with the cause last."""
    return bounded(reply.error.reason or "") or f"error {reply.error.code}"


def is_lost(reply: Message) -> bool:
    """Whether the node is lost, or had no time to answer: the error is the grid's."""
    return reply.error.code == ErrorCode.NODE_UNAVAILABLE


def has_raised(reply: Message) -> bool:
    """Whether the node's app ran and raised. The apps of this package always answer ``query``."""
    return reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION


def most_common(nodes: Iterable[Node], *properties: str) -> tuple[Any, ...] | None:
    """The most frequent values of `properties` (ties: the least); None if no node has them all."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for node in nodes:
        if all(name in node.properties for name in properties):
            values = tuple(node.properties[name] for name in properties)
            counts[values] += 1
    if not counts:
        return None
    return min(counts, key=lambda values: (-counts[values], values))


def finite(state: Any) -> bool:
    """Whether all numbers in nested dicts, lists, tuples and sets of arrays are finite."""
    if isinstance(state, np.ndarray):
        if state.dtype.kind != "f":
            return True
        # A finite sum of squares takes half of the time of a check of each number. An infinite one
        # proves nothing: the squares of large finite numbers overflow.
        return math.isfinite(np.vdot(state, state)) or bool(np.isfinite(state).all())
    if isinstance(state, Mapping):
        return all(map(finite, state.values()))
    if isinstance(state, list | tuple | set):
        return all(map(finite, state))
    return not isinstance(state, float) or math.isfinite(state)
