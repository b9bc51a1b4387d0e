"""The state of one round, requests within it, early stopping, and the contract of privacy."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import Message

from clients.arrays import Arrays
from strategies.replies import Node, Update


class Stop(Exception):
    """Raised by `on_round` to end training after the present round."""


class Protection(Protocol):
    """Differential privacy of a run, see `strategies.privacy.Privacy`."""

    expected: float  # users in a round, where the actual number is secret
    hides_participants: bool
    covers: str

    def settings(self) -> dict[str, Any]:
        """Entries of every train message's config."""

    def admit(self, what: str) -> None:
        """Note a message that the budget does not cover; ValueError if it covers everything."""

    def sample(self, nodes: Sequence[Node], round_: int) -> list[Node] | None:
        """The round's nodes, perhaps none, drawn in secret; None: the sample is no secret."""

    def spend(self, nodes: Sequence[Node]) -> None:
        """Count a round in which these nodes are asked to train, before they are asked."""

    def protect(self, updates: Sequence[Update], arrays: Arrays, round_: int) -> list[Update]:
        """The updates to aggregate instead of those received, which started from `arrays`."""

    def released(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a round's report that may be written."""

    def report(self) -> dict[str, Any]:
        """The budget spent, and its terms."""

    def state(self) -> dict[str, Any]:
        """All that lives through the run."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""


@dataclass(frozen=True)
class Request:
    """One message to each of several nodes; `like` as in `Hooks.exchange`."""

    action: str
    payloads: Mapping[Node, Arrays]
    config: Mapping[str, Any] = field(default_factory=dict)
    like: Mapping[Node, Arrays] = field(default_factory=dict)


@dataclass
class Round:
    """What a strategy keeps for one round."""

    number: int = 0
    sent: list[tuple[Message, Node]] = field(default_factory=list)  # without a reply yet
    payloads: dict[Node, Arrays] = field(default_factory=dict)  # the train messages' arrays
    report: dict[str, Any] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)  # refused replies by cause
    clipped: int = 0  # updates beyond max-update-norm
    bytes: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})
    started: float = field(default_factory=time.monotonic)
    evaluated: bool = False  # whether this round evaluates, even if no client is asked
    phase_started: float = field(default_factory=time.monotonic)
    phases: dict[str, float] = field(default_factory=dict)  # seconds

    def end_phase(self, phase: str) -> None:
        """Record the time since the last phase ended as that of `phase`."""
        now = time.monotonic()
        self.phases[phase], self.phase_started = now - self.phase_started, now
