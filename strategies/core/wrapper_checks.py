"""What is checked where another loop than a strategy's own runs its rounds, as Flower's privacy
wrappers do: what the loop would break, and what it makes untrue."""

from collections.abc import Collection, Sequence
from logging import WARNING
from typing import Protocol

from flwr.app import ArrayRecord
from flwr.common.logger import log

from clients.core.arrays import Arrays
from strategies.core.late_replies import LateReplies
from strategies.core.replies import Requirement, Update


class WrappedStrategy(Protocol):
    """The part of a strategy that `WrapperChecks` reads."""

    keeps_arrays: bool
    requires: Requirement | None
    evaluate_every: int
    round_quorum: float
    round_deadline: float
    weighted_by_key: str
    late: LateReplies

    @property
    def round(self) -> int:
        """The number of the present round."""

    def expected(self, sent: Arrays) -> Arrays | None:
        """The arrays that a reply must be like; see `PersonalizedStrategy`."""


class WrapperChecks:
    """Checks and warnings for a strategy inside a wrapper."""

    def __init__(self, strategy: WrappedStrategy) -> None:
        self._strategy = strategy
        self._name = type(strategy).__name__
        self._noise_warnings: set[str] = set()  # kinds of reasons that were logged

    def check_rounds(self) -> None:
        """Raise ValueError for settings of rounds that another loop runs, or reads the replies
        of."""
        strategy = self._strategy
        if strategy.late.active:
            raise ValueError(
                f"{self._name} has round_quorum {strategy.round_quorum:g}, round_deadline "
                f"{strategy.round_deadline:g} or latency, but another loop waits for its replies: "
                "call its own start, without an aggregate_train of yours, or leave them out"
            )

    def check_payloads(self, record: ArrayRecord, payloads: Collection[Arrays]) -> None:
        """Raise ValueError unless a wrapper can protect the strategy.

        A wrapper clips arrays and adds noise by their position in its `record`. So clients must get
        and return arrays of the same names, order and shapes."""
        strategy = self._strategy
        if strategy.keeps_arrays:
            why = "its arrays stay on the server, where no wrapper can add noise to them"
        elif strategy.requires is not None and strategy.requires.needs_exchanges:
            why = f"its clients {strategy.requires.behaviour}, which no wrapper clips"
        elif not self._are_like(record, payloads):
            why = "its clients do not get and return the very arrays that a wrapper clips"
        else:
            return
        raise ValueError(
            f"{self._name} cannot run inside another strategy, such as Flower's privacy wrappers: "
            f"{why}. Call {self._name}.start itself; for its own privacy see "
            "docs/concepts/privacy.md"
        )

    def _are_like(self, record: ArrayRecord, payloads: Collection[Arrays]) -> bool:
        """Whether payloads and expected replies have the names, order and shapes of the record."""
        needed = [(name, tuple(array.shape)) for name, array in record.items()]
        for sent in payloads:
            for arrays in (sent, self._strategy.expected(sent) or {}):
                if [(name, array.shape) for name, array in arrays.items()] != needed:
                    return False
        return True

    def warn_of_last_round(self) -> None:
        """Warn if a wrapper's last round may not be evaluated."""
        every = self._strategy.evaluate_every
        if every > 1:
            log(
                WARNING,
                "%s runs inside another strategy, which does not say which round is the last: with "
                "evaluate_every=%s the last round may not be evaluated; leave it out to evaluate "
                "every round",
                self._name,
                every,
            )

    def warn_of_noise(self, updates: Sequence[Update], num_asked: int) -> None:
        """Warn, once for each kind of reason, where the wrapper's noise would be too small."""
        strategy = self._strategy
        robust = getattr(strategy, "robust", "none")
        reasons = too_small_noise(updates, num_asked, strategy.weighted_by_key, robust)
        for kind, reason in reasons.items():
            if kind in self._noise_warnings:
                continue
            self._noise_warnings.add(kind)
            log(
                WARNING,
                "round %s: %s runs inside another strategy. If that adds noise, as Flower's "
                "privacy wrappers do, the noise is too small and its ε does not hold: %s",
                strategy.round,
                self._name,
                reason,
            )

    def warn_of_skipped_round(self) -> None:
        """Warn that the wrapper did not pass on the replies of the round."""
        log(
            WARNING,
            "round %s: the strategy around %s aggregates nothing, as Flower's privacy wrappers do "
            "where a client fails or too few answer; the model stays that of the round before",
            self._strategy.round,
            self._name,
        )


def too_small_noise(
    updates: Sequence[Update], num_asked: int, weighted_by: str, robust: str
) -> dict[str, str]:
    """By kind, why the mean of these updates reveals more of a client than a wrapper's noise hides.

    The noise is made for the plain mean over all `num_asked` clients. `weighted_by` is the key of
    the weights, `robust` the rule in place of the mean, or "none"."""
    reasons: dict[str, str] = {}
    weights = [update.num_examples for update in updates]
    if weights and min(weights) < max(weights):
        reasons["weights"] = (
            f"the mean weighs clients by {weighted_by}, here {min(weights):g} to {max(weights):g}; "
            "let every client send 1 under another name, and give this name as weighted_by_key="
        )
    if len(updates) < num_asked:
        reasons["dropped"] = (
            f"{len(updates)} of {num_asked} replies are valid, so that each counts more"
        )
    if robust != "none":
        reasons["robust"] = f"robust is {robust!r}, which is no mean; leave it out"
    return reasons
