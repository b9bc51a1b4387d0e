"""The state of one round, requests within it, and early stopping."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flwr.app import Message

from clients.core.arrays import Arrays
from strategies.core.replies import Node

Sent = list[tuple[Message, Node]]  # messages, each with the node that gets it


class Stop(Exception):
    """Raised by `on_round` to end training after the present round."""


@dataclass(frozen=True)
class Request:
    """One message to each of several nodes, for `PersonalizedStrategy.exchange_together`.

    `action` is Flower's message type, such as "query.encode". `payloads` are each node's arrays.
    `config` is added to the config of every message. `like` is that of
    `PersonalizedStrategy.exchange`."""

    action: str
    payloads: Mapping[Node, Arrays]
    config: Mapping[str, Any] = field(default_factory=dict)
    like: Mapping[Node, Arrays] = field(default_factory=dict)


class PersonalizationCost(NamedTuple):
    """The mean cost of `PersonalizedStrategy.personalize` for one node, on the server."""

    seconds: float = 0.0
    bytes_down: float = 0.0
    bytes_up: float = 0.0


@dataclass
class Round:
    """The state of one round; the next round starts with a new object."""

    number: int = 0
    sent: Sent = field(default_factory=list)  # replies not yet received
    payloads: dict[Node, Arrays] = field(default_factory=dict)  # the train messages' arrays
    report: dict[str, Any] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)  # refused replies by cause
    failure: str = ""  # the first refused reply, in one line
    causes: dict[str, str] = field(default_factory=dict)  # texts of refused replies, by cause
    clipped: int = 0  # updates that were clipped, by max-update-norm or by max-update-ratio
    recounted: int = 0  # updates that count with fewer samples than they reported
    bytes: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})
    # Of `personalize`: what is done once, with training clients, and for no single node.
    preparation_cost: PersonalizationCost = field(default_factory=PersonalizationCost)
    personalization_cost: PersonalizationCost = field(default_factory=PersonalizationCost)
    started: float = field(default_factory=time.monotonic)
    training: bool = False  # from the sampling to the aggregation
    has_state: bool = True  # False: the strategy's state is that of an earlier round
    evaluated: bool = False  # whether this round evaluates, even if no client is asked
    phase_started: float = field(default_factory=time.monotonic)
    phases: dict[str, float] = field(default_factory=dict)  # seconds

    def end_phase(self, phase: str) -> None:
        """Record the time since the end of the previous phase under the name `phase`."""
        now = time.monotonic()
        self.phases[phase] = now - self.phase_started
        self.phase_started = now
