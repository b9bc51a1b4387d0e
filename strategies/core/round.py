"""The state of one round, requests within it, and early stopping."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from clients.core.arrays import Arrays
from strategies.core.replies import Node


class Stop(Exception):
    """Raised by `on_round` to end training after the present round."""


@dataclass(frozen=True)
class Request:
    """One message to each of several nodes; `like` as in `StrategyBase.exchange`."""

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
    failure: str = ""  # the first of them, in one line
    clipped: int = 0  # updates beyond max-update-norm or max-update-ratio
    recounted: int = 0  # updates that count with fewer samples than they reported
    bytes: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})
    personalized: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of a node: seconds, bytes down, up
    started: float = field(default_factory=time.monotonic)
    evaluated: bool = False  # whether this round evaluates, even if no client is asked
    phase_started: float = field(default_factory=time.monotonic)
    phases: dict[str, float] = field(default_factory=dict)  # seconds

    def end_phase(self, phase: str) -> None:
        """Record the time since the last phase ended as that of `phase`."""
        now = time.monotonic()
        self.phases[phase], self.phase_started = now - self.phase_started, now
