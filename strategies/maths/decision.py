"""What a server makes of sums over training clients' played newcomers: the numbers of the rule
(`clients.core.decision`), each a function of sums."""

import numpy as np

from clients.core.decision.choice import NEVER, UNBOUNDED
from clients.core.decision.played import SIZES
from clients.core.decision.tallies import DESCRIPTOR_VALUES, GUARDS, MISFITS, WIN_RATES, Grid

LIMIT = 0.975  # share of newcomers with unchanged inputs whose T is at most t
OUTER = 0.02  # share of newcomers beyond each end of a range
PENALTY = 10.0  # of the logistic model's coefficients, on the summed likelihood
STEPS = 8  # of Newton's method
RIDGE = 3.0  # penalty of the calibration
FOLDS = 5
SHARE_OF_SIZE = 0.1  # share of newcomers that makes a size one that the rule knows
SMALLEST = 1e-6  # deviation
ROUNDING = 1e-9  # of sums of shares


def deviation(count: np.ndarray, total: np.ndarray, square: np.ndarray) -> np.ndarray:
    """√(Σx²/n − (Σx/n)²), at least SMALLEST."""
    n = np.maximum(count, 1)
    variance = square / n - np.square(total / n)
    return np.sqrt(np.maximum(variance, SMALLEST**2))


def upper_quantile(histogram: np.ndarray, grid: Grid, share: float) -> float:
    """The upper edge of the bin in which the cumulative share reaches `share`."""
    cumulative = np.cumsum(histogram)
    reached = cumulative >= min(share, 1.0) * cumulative[-1] - 1e-9
    return float(grid.edges[1:][np.argmax(reached)])


def lower_quantile(histogram: np.ndarray, grid: Grid, share: float) -> float:
    """The lower edge of the bin in which the cumulative share exceeds `share`."""
    cumulative = np.cumsum(histogram)
    exceeded = cumulative > share * cumulative[-1]
    return float(grid.edges[:-1][np.argmax(exceeded)])


def misfit_limit(histogram: np.ndarray, clients: int) -> float:
    """t: the quantile 0.975 (1 + 1/N) of T, N the number of clients; from N = 38 down the
    largest T."""
    return upper_quantile(histogram, MISFITS, LIMIT * (1 + 1 / clients))


def ranges(histograms: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """The range (J, 4, 2) that holds the 2 to 98 % of each descriptor (J, 4, bins). Entries that
    are not to be `cut` (J, 4) have no bounds."""
    result = np.empty((*cut.shape, 2))
    for place in np.ndindex(cut.shape):
        result[place] = (-UNBOUNDED, UNBOUNDED)
        if cut[place] and histograms[place].any():
            low = lower_quantile(histograms[place], DESCRIPTOR_VALUES, OUTER)
            high = upper_quantile(histograms[place], DESCRIPTOR_VALUES, 1 - OUTER)
            result[place] = (low, high)
    return result


def newton_step(theta: np.ndarray, gradient: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """θ + (−H + λ I)⁻¹ (∇ − λ θ), the step to the maximum of Σ log P − λ ‖θ‖² / 2."""
    flat = theta.ravel()
    penalised = hessian + PENALTY * np.eye(len(flat))
    step = np.linalg.solve(penalised, gradient - PENALTY * flat)
    return np.asarray((flat + step).reshape(theta.shape))


def calibrated(sums: np.ndarray) -> np.ndarray:
    """α, β and the range of w̃ (4,) from the sums (bins, 6) of one regime and candidate.

    The range holds 2 to 98 % of the newcomers and ends at edges of bins; w̃ beyond it counts as its
    end. (α, β) minimise Σ ω (y − α − β x)² + 3 (α² + β²): without newcomers both are 0, and nothing
    is expected to be won."""
    if not sums[:, 0].any():
        return np.zeros(4)
    low = lower_quantile(sums[:, 0], WIN_RATES, OUTER)
    high = upper_quantile(sums[:, 0], WIN_RATES, 1 - OUTER)
    starts = WIN_RATES.edges[:-1]
    inside = (starts > low - 1e-9) & (starts < high - 1e-9)
    total, total_x, total_xx, total_y, total_xy = sums[inside, 1:].sum(0)
    for beyond, end in ((starts < low - 1e-9, low), (starts > high - 1e-9, high)):
        weight, _, _, weighted_gain, _ = sums[beyond, 1:].sum(0)
        total += weight
        total_x += weight * end
        total_xx += weight * end * end
        total_y += weighted_gain
        total_xy += weighted_gain * end
    normal = np.array([[total + RIDGE, total_x], [total_x, total_xx + RIDGE]])
    alpha, beta = np.linalg.solve(normal, [total_y, total_xy])
    return np.array([alpha, beta, low, high])


def largest_size(reached: np.ndarray) -> int:
    """The largest size that a tenth of the newcomers have, by how many have at least the inputs of
    each size (3,)."""
    common = reached >= SHARE_OF_SIZE * reached[0]
    common &= reached > 0
    return SIZES[int(common.sum()) - 1] if common.any() else SIZES[0]


def least_guard(
    losses: np.ndarray,
    corrected: np.ndarray,
    clients: float,
    alpha: float,
    *,
    of_corrected: bool = False,
) -> float:
    """The least k for which (Σ_i loss_i + 1) / (N + 1) ≤ α, there and above. NEVER where there is
    none, and where no newcomer gets a correction by it: nothing is known of the harm of one.

    `losses` and `corrected` (K,) are sums over the N `clients`: of the shares of newcomers that are
    harmed, and that get a correction. With `of_corrected` also Σ_i loss_i ≤ α Σ_i corrected_i."""
    holds = (losses + 1) / (clients + 1) <= alpha
    able = np.logical_and.accumulate(holds[::-1])[::-1]  # there and above
    able &= corrected > 0
    if of_corrected:
        able &= losses <= alpha * corrected + ROUNDING
    if not able.any():
        return NEVER
    return float(GUARDS[np.argmax(able)])
