"""The rounds of a training that several runs share: one run trains them, the others take them.

Methods that differ in evaluations alone train the same arrays, bit by bit. The run that trains
keeps, after each evaluated round, the strategy's state and the reports on training of that round
and of those since the evaluated round before it: a *span* of rounds. A run that takes a span
reports its rounds as if it had trained them, and evaluates the state at its end. A span that
nobody has kept is trained, so it does not matter which run trains which, or where one ends."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flwr.app import MetricRecord

from strategies.core.round_state import Round

# Keys of a strategy's state that are the run's own: they are not shared.
OF_THE_RUN = ("kept", "token", "privacy")

Content = dict[str, Any]


class Receiver(Protocol):
    """What passes the causes of dropped replies."""

    def pass_cause(self, key: str, text: str) -> bool:
        """Pass the text of a cause, unless it was passed before."""


class Training(Protocol):
    """What is read of a strategy, and set."""

    now: Round
    token: str
    evaluate_every: int
    num_rounds: int

    @property
    def receiver(self) -> Receiver:
        """What receives the replies."""

    def state(self) -> dict[str, Any]:
        """The run's state; see `PersonalizedStrategy`."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""


class KeptRounds:
    """Takes and keeps spans of rounds; `read` and `write` store one by the number of its last.

    `read` returns None for a span that is not stored."""

    def __init__(
        self, read: Callable[[int], Content | None], write: Callable[[int, Content], None]
    ) -> None:
        self._read = read
        self._write = write
        self._taken: Content | None = None  # the span of the present round, if it was taken
        self._reports: dict[int, Content] = {}  # of the present span's rounds that were trained
        self.seconds = 0.0  # that the training of all taken rounds has lasted

    def take(self, strategy: Training, number: int) -> MetricRecord | None:
        """Let the strategy continue as after the training of that round, and return its metrics;
        None if the round has to be trained.

        Only at the end of a span it gets the state: `has_state` of the round says so. Raises
        ValueError if the state does not fit."""
        last = last_of_span(strategy, number)
        if self._taken is None or self._taken["last"] != last:
            self._taken = None
            # A span is taken as a whole, or trained as a whole.
            if not self._reports:
                self._taken = self._read(last)
        if self._taken is None:
            return None
        kept = self._taken["reports"][number]
        now = Round(number, report=dict(kept["report"]), phases=dict(kept["phases"]))
        strategy.now = now
        now.has_state = number == last
        if now.has_state:
            strategy.load_state(self._taken["state"] | {"token": strategy.token})
        now.started -= kept["seconds"]
        # A folder that an earlier release has begun has no causes.
        for key, text in kept.get("causes", {}).items():
            strategy.receiver.pass_cause(key, text)
        self.seconds += kept["seconds"]
        return MetricRecord(kept["metrics"])

    def keep(self, strategy: Training, metrics: MetricRecord | None) -> None:
        """Keep the round that was trained; at the end of a span, write it."""
        now = strategy.now
        last = last_of_span(strategy, now.number)
        self._reports[now.number] = {
            "report": dict(now.report),
            "phases": dict(now.phases),
            "metrics": dict(metrics or {}),
            "causes": dict(now.causes),
            "seconds": time.monotonic() - now.started,
        }
        if now.number < last:
            return
        reports = self._reports
        self._reports = {}
        if len(reports) < last - first_of_span(strategy, last) + 1:
            return  # the run has resumed within the span
        state = {key: value for key, value in strategy.state().items() if key not in OF_THE_RUN}
        self._write(last, {"last": last, "reports": reports, "state": state})


def last_of_span(strategy: Training, number: int) -> int:
    """The next evaluated round from `number` on."""
    every = strategy.evaluate_every
    return min(math.ceil(number / every) * every, strategy.num_rounds)


def first_of_span(strategy: Training, last: int) -> int:
    """The first round of the span that ends with the evaluated round `last`."""
    every = strategy.evaluate_every
    return (last - 1) // every * every + 1
