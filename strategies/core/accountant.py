"""ε(δ) of the rounds that users took part in, and the noise multiplier that keeps an ε.

*Central*: a user is added or removed; with sensitivity C and noise zC, one round at sampling rate
q is the Poisson-sampled Gaussian mechanism of multiplier z. Rounds of several (z, q) compose
numerically (Koskela et al., AISTATS 2020; Doroshenko et al., PoPETs 2022), to an upper bound.
*Local*: a user's update is replaced by another one; the two differ by at most 2C, so one round is
the Gaussian mechanism with (sensitivity / deviation)² = (2 / z)² = μ². The μ² of a user's rounds
add up to that of one Gaussian mechanism (Dong et al., JRSS B 2022, μ-GDP), without any loss."""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache

# dp_accounting is imported where it is used: it imports scipy.stats, a third of a client's start.

# Intervals of the discretised privacy loss. Little noise makes losses large, and a fine grid slow.
FINE = 1e-4
COARSE = 1e-3
LARGEST = 1e6  # noise multiplier that `multiplier` tries
PRECISION = 1.001  # ratio of the returned noise multiplier to one that does not keep ε

Rounds = Mapping[tuple[float, float], int]  # number of rounds by (z, q)


def local_loss(z: float) -> float:
    """μ² of one round of local noise."""
    return (2 / z) ** 2


@lru_cache(maxsize=64)
def local_epsilon(loss: float, delta: float) -> float:
    """ε(δ) of a user whose rounds' μ² add up to `loss`."""
    if not loss:
        return 0.0
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(loss**-0.5, delta))


def central_epsilon(rounds: Rounds, delta: float) -> float:
    """ε(δ) of all these rounds together."""
    counted = [(z_and_q, count) for z_and_q, count in rounds.items() if count]
    return _central_epsilon(tuple(sorted(counted)), delta)  # hashable, for the cache


@lru_cache(maxsize=64)
def _central_epsilon(rounds: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    if all(q == 1 for (_, q), _ in rounds):  # Gaussian mechanisms of sensitivity C
        loss = sum(count / z**2 for (z, _), count in rounds)
        return local_epsilon(loss, delta)
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns that a bound is pessimistic
    smallest_z = min(z for (z, _), _ in rounds)
    interval = FINE if smallest_z >= 1 else COARSE
    accountant = PLDAccountant(value_discretization_interval=interval)
    events = []
    for (z, q), count in rounds:
        one_round = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z))
        events.append(dp.SelfComposedDpEvent(one_round, count))
    accountant.compose(dp.ComposedDpEvent(events))
    return float(accountant.get_epsilon(delta))


def multiplier(epsilon: Callable[[float], float], target: float) -> float:
    """The smallest z, up to the ratio `PRECISION`, for which `epsilon(z)` is at most `target`.

    `epsilon` must fall with z. Raises ValueError if no z up to `LARGEST` is enough."""
    high = 1.0
    while epsilon(high) > target:
        high *= 2
        if high > LARGEST:
            raise ValueError(f"no noise keeps ε = {target:g}")
    low = high / 2
    while epsilon(low) <= target:
        low, high = low / 2, low
    while high > PRECISION * low:
        middle = (low * high) ** 0.5
        if epsilon(middle) > target:
            low = middle
        else:
            high = middle
    return high
