"""From an attack's errors to a lower bound of ε.

An attack tells two worlds apart by a score. With the rate α of false alarms and the rate β of
misses, a mechanism that is μ-GDP has μ ≥ Φ⁻¹(1 − α) − Φ⁻¹(β) (Dong et al., JRSS B 2022). Upper
bounds of α and β (Clopper and Pearson, 1934) make it a lower bound of μ, and so of ε at the stated
δ (Nasr et al., USENIX Security 2023). That holds for Gaussian noise. For any mechanism
ε ≥ ln((1 − δ − β) / α) (Kairouz et al., ICML 2015)."""

from collections.abc import Callable

import numpy as np
from scipy.stats import beta, norm

from strategies.core.accountant import local_epsilon

CONFIDENCE = 0.95
DOUBT = (1 - CONFIDENCE) / 2  # for each of the two rates

Floats = np.ndarray
Family = Callable[[Floats, Floats, float], Floats]  # α, β and δ to ε


def gaussian(alarms: Floats, misses: Floats, delta: float) -> Floats:
    """ε at `delta` of Gaussian noise with these rates; 0 where they show no difference."""
    mu = norm.ppf(1 - alarms) - norm.ppf(misses)
    return np.array([local_epsilon(m**2, delta) if m > 0 else 0.0 for m in mu])


def any_mechanism(alarms: Floats, misses: Floats, delta: float) -> Floats:
    """ε at `delta` of whatever has these rates, by the better of the two one-sided bounds."""
    with np.errstate(divide="ignore"):
        by_hits = np.log(np.maximum(1 - delta - misses, 0) / alarms)
        by_rejections = np.log(np.maximum(1 - delta - alarms, 0) / misses)
    return np.maximum(0, np.maximum(by_hits, by_rejections))


def highest_rate(errors: Floats, trials: int) -> Floats:
    """The upper bound of Clopper and Pearson for a rate, at a one-sided doubt of `DOUBT`."""
    upper = beta.ppf(1 - DOUBT, errors + 1, np.maximum(trials - errors, 1))
    return np.where(errors < trials, upper, 1.0)


def at_thresholds(
    without: Floats, present: Floats, thresholds: Floats, delta: float, family: Family
) -> Floats:
    """The lower bound of ε for each threshold, if scores above it are taken for "present"."""
    alarms = (without[:, None] > thresholds).sum(0)
    misses = (present[:, None] <= thresholds).sum(0)
    return family(highest_rate(alarms, len(without)), highest_rate(misses, len(present)), delta)


def lower_bound(without: Floats, present: Floats, delta: float, family: Family = gaussian) -> float:
    """ε(δ) that the scores of the two worlds prove, at a confidence of `CONFIDENCE`.

    Half of the scores choose the threshold, the others are counted, so that the choice costs no
    confidence."""
    choosing_without = without[::2]
    choosing_present = present[::2]
    if family is gaussian:
        # Halfway, which is best for equal deviations and depends least on chance.
        threshold = np.array([(choosing_without.mean() + choosing_present.mean()) / 2])
    else:
        candidates = np.unique(np.concatenate([choosing_without, choosing_present]))
        bounds = at_thresholds(choosing_without, choosing_present, candidates, delta, family)
        threshold = candidates[[bounds.argmax()]]
    bounds = at_thresholds(without[1::2], present[1::2], threshold, delta, family)
    return float(bounds[0])
