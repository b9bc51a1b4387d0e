"""How well other class proportions alone explain a client's inputs.

φ̄ is the mean of φ over n inputs. With proportions q its expectation is Mᵀ q, and its covariance
Σ_l = B_l + S_l / n + 0.03 (tr / d_l) I with tr the trace of B_l + S_l / n. Then

    q = argmin over the simplex of Σ_{l ∈ {last layer, softmax}} ‖φ̄_l − M_lᵀ q‖² in Σ_l⁻¹,
    T_l = log(‖φ̄_l − M_lᵀ q‖² / d_l).

A high T_l says that more than the proportions has changed."""

from dataclasses import dataclass

import numpy as np
import scipy  # loads its modules on first use

from clients.core.decision.moments import Blocks

SHRINKAGE = 0.03  # weight of the identity in Σ_l, relative to the mean variance
SMALLEST = 1e-12  # variance and squared distance, so that a constant φ_l divides nothing by 0
FITTED = (-3, -2)  # the blocks that decide q: the last layer, the softmax
SOFTMAX = -2  # the block of the mean prediction
# Fits that the clients of a process share: newcomers of three sizes in five folds. Each has
# d_l² numbers for each block, so that of wide networks fewer are kept.
MOST_SHARED = 16
MOST_SHARED_NUMBERS = 2**30  # 8 GiB
NUMBERS_OF_FIT = 2  # times Σ d_l²: L_l⁻¹, and S and B, which fits of several n share


@dataclass(frozen=True)
class Statistics:
    """Of the training clients' samples: M (C, D), S and B (Σ d_l²,) for `blocks`, K (C, C) with
    K_ab = P(predicted a | label b), π (C,), and which classes are `present` (C,)."""

    blocks: Blocks
    means: np.ndarray
    within: np.ndarray
    between: np.ndarray
    confusion: np.ndarray
    prior: np.ndarray
    present: np.ndarray

    def equals(self, other: "Statistics") -> bool:
        """Whether all numbers are the same."""
        return self.blocks == other.blocks and all(
            map(np.array_equal, self.arrays(), other.arrays())
        )

    def arrays(self) -> list[np.ndarray]:
        """M, S, B, K, π and which classes are present."""
        return [
            self.means,
            self.within,
            self.between,
            self.confusion,
            self.prior,
            self.present,
        ]


class LabelShiftFit:
    """Fits of clients with n inputs: the whitened M_l are computed once."""

    def __init__(self, statistics: Statistics, n: int) -> None:
        self.statistics = statistics
        self.n = n
        blocks = statistics.blocks
        within = blocks.matrices(statistics.within)
        between = blocks.matrices(statistics.between)
        # L_l⁻¹ for Σ_l = L_l L_lᵀ: distances in Σ_l⁻¹ are plain ones of whitened vectors.
        self._whitening = []
        for b, s in zip(between, within, strict=True):
            factor = np.linalg.cholesky(covariance(b + s / n))
            identity = np.eye(len(factor))
            self._whitening.append(scipy.linalg.solve_triangular(factor, identity, lower=True))
        self._means = self.whitened(statistics.means)

    def whitened(self, phi: np.ndarray) -> list[np.ndarray]:
        """L_l⁻¹ φ_l (…, d_l) of φ (…, D)."""
        parts = self.statistics.blocks.split(phi)
        return [part @ w.T for part, w in zip(parts, self._whitening, strict=True)]

    def proportions(self, phi_mean: np.ndarray) -> np.ndarray:
        """q (C,) of a client with φ̄ (D,). It is 0 for a class without a sample, whose M is the mean
        of all samples, and would explain every client."""
        target = self.whitened(phi_mean)
        matrix = np.hstack([self._means[block] for block in FITTED])
        vector = np.concatenate([target[block] for block in FITTED])
        present = self.statistics.present
        q = np.zeros(len(present))
        q[present] = nearest_mixture(matrix[present].T, vector)
        return q

    def misfits(self, phi_mean: np.ndarray, q: np.ndarray) -> np.ndarray:
        """T_l (L,) of a client with φ̄ (D,) and the proportions q (C,)."""
        misfits = []
        for means, target in zip(self._means, self.whitened(phi_mean), strict=True):
            squared_distance = np.square(target - q @ means).sum()
            misfits.append(np.log(max(squared_distance, SMALLEST) / len(target)))
        return np.array(misfits)


_shared: list[LabelShiftFit] = []  # the oldest first


def shared_fit(statistics: Statistics, n: int) -> LabelShiftFit:
    """The fit of clients with n inputs. The clients of a process share the newest fits, since a
    server sends the same statistics to all novel clients, and to all training clients of a fold."""
    for fit in [*_shared]:  # a copy: other threads may serve other runs
        if fit.statistics.equals(statistics):
            statistics = fit.statistics  # one copy of these, for fits of all n
            if fit.n == n:
                return fit
    # Room is made before the fit needs it.
    num_kept = most_shared(statistics.blocks) - 1
    del _shared[: max(len(_shared) - num_kept, 0)]
    fit = LabelShiftFit(statistics, n)
    _shared.append(fit)
    return fit


def most_shared(blocks: Blocks) -> int:
    """How many fits of such blocks a process keeps: one at least."""
    return max(1, min(MOST_SHARED, MOST_SHARED_NUMBERS // (NUMBERS_OF_FIT * blocks.entries)))


def covariance(matrix: np.ndarray) -> np.ndarray:
    """Σ = A + 0.03 (tr A / d) I, positive definite also where A is 0."""
    mean_variance = max(np.trace(matrix) / len(matrix), SMALLEST)
    return np.asarray(matrix + SHRINKAGE * mean_variance * np.eye(len(matrix)))


def nearest_mixture(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """argmin over the simplex of ‖A q − b‖², with A (m, C) and b (m,).

    On the simplex A q − b = D q with D = A − b 1ᵀ. For u = s q the sum ‖D u‖² + (1ᵀu − 1)² is least
    at s = 1 / (1 + ‖D q‖²), where it is ‖D q‖² / (1 + ‖D q‖²), which grows with ‖D q‖². So u of the
    non-negative least squares gives q = u / 1ᵀu, exactly."""
    difference = columns - target[:, None]
    scale = max(np.abs(difference).max(), SMALLEST)
    rows = np.vstack([difference / scale, np.ones(columns.shape[1])])
    last = np.zeros(len(rows))
    last[-1] = 1
    u, _ = scipy.optimize.nnls(rows, last)
    return np.asarray(u / u.sum())
