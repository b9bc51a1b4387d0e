"""Sums over a client's played newcomers, from which the server makes the rule.

Quantiles are those of histograms: counts in bins of equal width. The first and the last bin also
count the values beyond the ends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clients.core.decision.choice import DESCRIPTORS, Case, Rule, choices_by_k
from clients.core.decision.logistic import gradient_and_hessian
from clients.core.decision.played import SIZES

REGIMES = 2


@dataclass(frozen=True)
class Grid:
    """Bins from `low` to `high`."""

    low: float
    high: float
    bins: int

    @property
    def edges(self) -> np.ndarray:
        """The ends (bins + 1,) of the bins."""
        return np.linspace(self.low, self.high, self.bins + 1)

    def bin_of(self, value: float) -> int:
        """The bin that holds the value."""
        place = int((value - self.low) / (self.high - self.low) * self.bins)
        return min(max(place, 0), self.bins - 1)


MISFITS = Grid(-10.0, 90.0, 2000)  # T
DESCRIPTOR_VALUES = Grid(-30.0, 30.0, 1200)
WIN_RATES = Grid(-1.0, 1.0, 200)  # w̃
GUARDS = np.linspace(0, 10, 101)  # k


def misfit_sums(cases: Sequence[Case], num_blocks: int) -> dict[str, np.ndarray]:
    """Count (1,), Σ T_l and Σ T_l² (L,) of newcomers with unchanged inputs."""
    misfits = [case.misfits for case in cases if case.unchanged]
    values = np.array(misfits).reshape(-1, num_blocks)
    return {
        "count": np.array([len(values)], float),
        "sum": values.sum(0),
        "square": np.square(values).sum(0),
    }


def size_counts(cases: Sequence[Case]) -> dict[str, np.ndarray]:
    """By each of the `SIZES` how many newcomers have at least so many inputs (3,)."""
    counts = np.zeros(len(SIZES))
    for case in cases:
        counts += case.n >= np.array(SIZES)
    return {"sizes": counts}


def histograms(rule: Rule, cases: Sequence[Case], num_candidates: int) -> dict[str, np.ndarray]:
    """Of T (bins,) of newcomers with unchanged inputs; of the descriptors (J, 4, bins) of newcomers
    with changed predictions."""
    misfits = np.zeros(MISFITS.bins)
    descriptors = np.zeros((num_candidates, DESCRIPTORS, DESCRIPTOR_VALUES.bins))
    for case in cases:
        if case.unchanged:
            misfits[MISFITS.bin_of(rule.misfit(case))] += 1
        for candidate in np.flatnonzero(case.changed).tolist():
            for entry, value in enumerate(case.descriptors[candidate]):
                descriptors[candidate, entry, DESCRIPTOR_VALUES.bin_of(value)] += 1
    return {"misfits": misfits, "descriptors": descriptors}


def feature_sums(
    rule: Rule, cases: Sequence[Case], num_candidates: int, num_features: int
) -> dict[str, np.ndarray]:
    """Count (J,), sum and squares (J, F − 1) of the features of changed samples."""
    count = np.zeros(num_candidates)
    total = np.zeros((num_candidates, num_features - 1))
    square = np.zeros((num_candidates, num_features - 1))
    for case in cases:
        for candidate in range(num_candidates):
            features = rule.raw_features(case, candidate)
            count[candidate] += len(features)
            total[candidate] += features.sum(0)
            square[candidate] += np.square(features).sum(0)
    return {"count": count, "sum": total, "square": square}


def derivatives(
    rule: Rule, cases: Sequence[Case], coefficients: np.ndarray
) -> dict[str, np.ndarray]:
    """Gradient (J, S, 2F) and minus the Hessian (J, S, 2F, 2F) of the log-likelihood, at S sets of
    coefficients (J, S, 2, F)."""
    num_candidates, num_sets, _, num_features = coefficients.shape
    gradients = np.zeros((num_candidates, num_sets, 2 * num_features))
    hessians = np.zeros((num_candidates, num_sets, 2 * num_features, 2 * num_features))
    for candidate in range(num_candidates if cases else 0):
        features = np.concatenate([rule.features(case, candidate) for case in cases])
        outcomes = np.concatenate([case.outcomes[candidate] for case in cases])
        for place, theta in enumerate(coefficients[candidate]):
            gradient, hessian = gradient_and_hessian(features, outcomes, theta)
            gradients[candidate, place] = gradient
            hessians[candidate, place] = hessian
    return {"gradient": gradients, "hessian": hessians}


def calibration_sums(
    rule: Rule, cases: Sequence[Case], num_candidates: int
) -> dict[str, np.ndarray]:
    """By regime, candidate and bin of x = w̃ (2, J, bins, 6): the number of newcomers, and with the
    weight ω = n d and y = gain/d the sums of ω, ωx, ωx², ωy, ωxy."""
    sums = np.zeros((REGIMES, num_candidates, WIN_RATES.bins, 6))
    for case in cases:
        regime = rule.regime(case)
        for candidate in np.flatnonzero(case.changed).tolist():
            x = rule.raw_win_rate(case, candidate)
            weight = len(case.evidence[candidate])
            y = -case.inputs_lost(candidate) / weight
            terms = (1, weight, weight * x, weight * x * x, weight * y, weight * x * y)
            sums[regime, candidate, WIN_RATES.bin_of(x)] += terms
    return {"calibration": sums}


def guard_losses(
    rule: Rule, cases: Sequence[Case], candidates: Sequence[str]
) -> dict[str, np.ndarray]:
    """By regime the share of the client's newcomers that each k harms, and of those that get a
    correction by it, and what they gain in the mean, as a share of their inputs (2, K); whether the
    client has newcomers in that regime (2,).

    Newcomers of fewer inputs than a choice needs do not count: no client is like them."""
    harmed = np.zeros((REGIMES, len(GUARDS)))
    corrected = np.zeros((REGIMES, len(GUARDS)))
    gain = np.zeros((REGIMES, len(GUARDS)))
    count = np.zeros(REGIMES)
    for case in cases:
        if case.n < SIZES[0]:
            continue
        by_k = choices_by_k(rule, case, candidates, GUARDS)
        harmed[by_k.regime] += by_k.harmed
        corrected[by_k.regime] += by_k.corrected
        gain[by_k.regime] += by_k.gain
        count[by_k.regime] += 1
    newcomers = np.maximum(count, 1)[:, None]
    return {
        "loss": harmed / newcomers,
        "corrected": corrected / newcomers,
        "gain": gain / newcomers,
        "clients": (count > 0).astype(float),
    }
