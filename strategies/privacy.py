"""Differential privacy of a run: noise multiplier, central noise, and ε(δ) by dp-accounting.

*Central*: each user takes part with the sampling rate q, by a coin of its own (Poisson sampling;
an empty round is drawn again); with m = q N users expected, the server applies
(Σ_u clip_C(Δ_u) + N(0, z²C²)) / m. ε(δ) is that of the Poisson-sampled Gaussian mechanism,
composed over rounds, for adding or removing a user.
*Local*: each user adds N(0, z²C²) to its own update. ε(δ) protects a user's update against the
server: two updates of a user differ by at most 2C, so the mechanism has noise multiplier z/2; it
is composed over the rounds of the user who took part most often, and sampling hides nothing."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    calibrate_dp_mechanism,
)
from dp_accounting.mechanism_calibration import ExplicitBracketInterval
from dp_accounting.rdp import RdpAccountant
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from clients.arrays import Arrays
from clients.privacy import GENERATORS, NOISE, generator, noised
from strategies.replies import Update

# It warns of every Rényi order whose series does not converge and leaves that order out, which
# keeps ε an upper bound.
logging.getLogger("absl").setLevel(logging.ERROR)
MODES = ("none", "local", "central")
SMALLEST, LARGEST = 0.05, 1e4  # noise multipliers between which a given ε is sought


def epsilon(mode: str, z: float, rate: float, rounds: int, delta: float) -> float:
    """ε(δ) after `rounds` rounds with noise multiplier z; for `local`, rounds of one user."""
    accountant = RdpAccountant()
    accountant.compose(_event(mode, z, rate, rounds))
    return float(accountant.get_epsilon(delta))


def _event(mode: str, z: float, rate: float, rounds: int) -> DpEvent:
    one: DpEvent = GaussianDpEvent(z / 2)
    if mode == "central":
        one = PoissonSampledDpEvent(rate, GaussianDpEvent(z))
    return SelfComposedDpEvent(one, rounds)


class Privacy:
    """Settings `dp…` of a run of `rounds` rounds, `fraction_train` being the sampling rate q.

    Of `dp_noise_multiplier` z and `dp_epsilon` one is given, the other 0; z is then calibrated so
    that the whole run keeps ε at `dp_delta` (local: even for a user in every round). Raises
    ValueError for settings that contradict each other."""

    def __init__(
        self,
        *,
        dp: str = "none",
        dp_clip: float = 1.0,
        dp_noise_multiplier: float = 0.0,
        dp_epsilon: float = 0.0,
        dp_delta: float = 0.00001,
        dp_generator: str = "system",
        fraction_train: float = 1.0,
        rounds: int = 30,
        seed: int = 0,
    ) -> None:
        if dp not in MODES:
            raise ValueError(f"unknown dp {dp!r}; known: {', '.join(MODES)}")
        if dp_generator not in GENERATORS:
            raise ValueError(f"unknown dp-generator {dp_generator!r}; known: {GENERATORS}")
        if dp != "none" and (dp_clip <= 0 or not 0 < dp_delta < 1):
            raise ValueError(f"dp-clip is {dp_clip} and dp-delta {dp_delta}; > 0 and in (0, 1)")
        given = (dp_noise_multiplier, dp_epsilon)
        if dp != "none" and (min(given) < 0 or sum(value > 0 for value in given) != 1):
            raise ValueError(
                f"dp-noise-multiplier is {dp_noise_multiplier} and dp-epsilon {dp_epsilon}; "
                f"exactly one of them must be positive, the other 0"
            )
        self.mode, self.clip, self.delta = dp, dp_clip, dp_delta
        self.rate, self.rounds = fraction_train, rounds
        self._generator, self._seed = dp_generator, seed
        self._participations: Counter[int] = Counter()
        self._rounds_done = 0
        self.z = dp_noise_multiplier
        if dp != "none" and dp_epsilon > 0:
            self.z = calibrate_dp_mechanism(
                RdpAccountant,
                lambda z: _event(dp, z, fraction_train, rounds),
                dp_epsilon,
                dp_delta,
                ExplicitBracketInterval(SMALLEST, LARGEST),
                tol=1e-4,
            )

    @property
    def poisson(self) -> bool:
        """Whether users are sampled by coins of their own."""
        return self.mode == "central" and self.rate < 1

    def settings(self) -> dict[str, Any]:
        """What train messages tell the clients."""
        if self.mode == "none":
            return {}
        noise = self.z * self.clip if self.mode == "local" else 0.0
        return {KEY_CLIPPING_NORM: self.clip, NOISE: noise}

    def protect(
        self, updates: Sequence[Update], sent: Sequence[Arrays], round_: int, users: int
    ) -> list[Update]:
        """Updates whose plain mean is the private one; every user counts alike.

        `sent` are the arrays that the updates started from, `users` is N."""
        self._rounds_done += 1
        self._participations.update(update.node.client for update in updates)
        alike = [replace(update, num_examples=1) for update in updates]
        if self.mode != "central" or not alike:
            return alike
        factor = len(alike) / max(1.0, self.rate * users)
        scaled = [
            replace(u, arrays={n: x[n] + factor * (y - x[n]) for n, y in u.arrays.items()})
            for u, x in zip(alike, sent, strict=True)
        ]
        source = generator(self._generator, self._seed, "dp-central", round_)
        first = scaled[0]  # noise of the mean, put into one of its terms
        return [
            replace(first, arrays=noised(first.arrays, factor * self.z * self.clip, source)),
            *scaled[1:],
        ]

    def report(self) -> dict[str, float]:
        """ε(δ) of the rounds so far."""
        if self.mode == "none":
            return {}
        rounds = self._rounds_done
        if self.mode == "local":
            rounds = max(self._participations.values(), default=0)
        spent = epsilon(self.mode, self.z, self.rate, rounds, self.delta)
        return {"dp-epsilon": spent, "dp-delta": self.delta, "dp-noise-multiplier": self.z}
