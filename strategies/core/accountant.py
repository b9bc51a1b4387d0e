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

# dp_accounting is imported where it is used: scipy.stats takes a third of a client's start.
FINE, COARSE = 1e-4, 1e-3  # intervals of the discretised loss; little noise makes losses large
LARGEST = 1e6  # noise multiplier that is tried
PRECISION = 1.001  # of a noise multiplier, as a ratio

Rounds = Mapping[tuple[float, float], int]  # number of rounds by (z, q)


def local_loss(z: float) -> float:
    """μ² of one round of local noise."""
    return (2 / z) ** 2


def local_epsilon(loss: float, delta: float) -> float:
    """ε(δ) of a user whose rounds' μ² add up to `loss`."""
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(loss**-0.5, delta)) if loss else 0.0


def central_epsilon(rounds: Rounds, delta: float) -> float:
    """ε(δ) of all these rounds together."""
    return _central_epsilon(tuple(sorted((k, n) for k, n in rounds.items() if n)), delta)


@lru_cache(maxsize=64)
def _central_epsilon(rounds: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    if all(q == 1 for (_, q), _ in rounds):  # Gaussian mechanisms of sensitivity C
        return local_epsilon(sum(count / z**2 for (z, _), count in rounds), delta)
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns that a bound is pessimistic
    smallest = min(z for (z, _), _ in rounds)
    accountant = PLDAccountant(value_discretization_interval=FINE if smallest >= 1 else COARSE)
    accountant.compose(
        dp.ComposedDpEvent(
            [
                dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z)), count)
                for (z, q), count in rounds
            ]
        )
    )
    return float(accountant.get_epsilon(delta))


def multiplier(epsilon: Callable[[float], float], target: float) -> float:
    """The smallest z, up to `PRECISION`, whose `epsilon(z)`, which falls with z, is at most
    `target`. Raises ValueError if there is none."""
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
        low, high = (middle, high) if epsilon(middle) > target else (low, middle)
    return high
