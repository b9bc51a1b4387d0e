"""What a round of a strategy is made of: its state, what may end training, what protects it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import Message

from clients.arrays import Arrays
from strategies.replies import Node, Update


class Stop(Exception):
    """Raised by `on_round` to end training after the round at hand, in order."""


class Protection(Protocol):
    """Differential privacy of a run, see `strategies.privacy.Privacy`."""

    expected: float  # users in a round, where it is a secret how many there are
    hides_participants: bool
    covers: str

    def settings(self) -> dict[str, Any]:
        """What train messages tell the clients."""
        ...

    def admit(self, what: str) -> None:
        """Something leaves clients that the budget does not cover; ValueError if it must."""
        ...

    def toss(self, nodes: Sequence[Node], round_: int) -> list[Node] | None:
        """The round's nodes by secret coins, perhaps none; None: they may be known."""
        ...

    def spend(self, nodes: Sequence[Node]) -> None:
        """These nodes are about to be asked to train."""
        ...

    def protect(self, updates: Sequence[Update], arrays: Arrays, round_: int) -> list[Update]:
        """The updates to aggregate in place of those that came, which started from `arrays`."""
        ...

    def released(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """What of a round's report may be written down."""
        ...

    def report(self) -> dict[str, Any]:
        """What of the budget is spent, and what that covers."""
        ...

    def state(self) -> dict[str, Any]:
        """What lives through the run."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        ...


@dataclass(frozen=True)
class Request:
    """One message to each of several nodes; `like` as in `PersonalizedStrategy.exchange`."""

    action: str
    payloads: Mapping[Node, Arrays]
    config: Mapping[str, Any] = field(default_factory=dict)
    like: Mapping[Node, Arrays] = field(default_factory=dict)


@dataclass
class Round:
    """What a strategy keeps for the round at hand, and forgets with it."""

    number: int = 0
    sent: list[tuple[Message, Node]] = field(default_factory=list)  # awaiting their replies
    payloads: dict[Node, Arrays] = field(default_factory=dict)  # the train messages' arrays
    report: dict[str, Any] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)  # refused replies by cause
    clipped: int = 0  # updates beyond max-update-norm
    bytes: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})
    started: float = field(default_factory=time.monotonic)
    evaluated: bool = False  # whether an evaluation is due, be it of nobody
    lap: float = field(default_factory=time.monotonic)  # when the present phase began
    phases: dict[str, float] = field(default_factory=dict)  # seconds

    def ends(self, phase: str) -> None:
        """What went on since the last phase ended was `phase`."""
        now = time.monotonic()
        self.phases[phase], self.lap = now - self.lap, now
