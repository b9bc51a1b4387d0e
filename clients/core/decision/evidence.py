"""Evidence on the predictions that a correction changes.

For a changed sample, a is FedAvg's class and b the candidate's, and l_v the log-softmax of the view
v: the base network 0, the candidate j, and every other corrected network. Its evidence is

    l_0[b] − l_0[a],  l_j[b] − l_j[a],  l_0[a],  l_j[b],  l_v[b] − l_v[a] of every other view v,

log-odds cut to ±7. The descriptors of the whole client are, with d the share of changed
predictions,

    BBSE and mean matching: H(q) + (C − 1)/2n, ‖q − q_BBSE‖₁, R, log(d + 0.01),
    BN:   log n, H(q_EM after BN) + (C − 1)/2n, mean H before − mean H after, log(d + 0.01).

R is T of the softmax for q = π, and (C − 1)/2n the bias of an entropy of n samples."""

from collections.abc import Mapping

import numpy as np

CUT = 7.0  # log-odds
NEITHER, CANDIDATE, BASE = 0, 1, 2  # who is right on a changed sample


def entropy(q: np.ndarray) -> float:
    """H (nats) of q (C,), with 0 log 0 = 0."""
    positive = q[q > 0]
    return float(-(positive * np.log(positive)).sum())


def corrected_entropy(q: np.ndarray, n: int) -> float:
    """H(q) + (C − 1) / 2n."""
    return entropy(q) + (len(q) - 1) / (2 * n)


def changed_rows(base: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """The rows of log-probabilities (n, C) whose classes differ."""
    return np.flatnonzero(base.argmax(1) != candidate.argmax(1))


def sample_evidence(
    base: np.ndarray, views: Mapping[str, np.ndarray], name: str, rows: np.ndarray
) -> np.ndarray:
    """Evidence (m, 4 + other views) of the changed `rows` (m,) for the candidate `name`, from
    log-probabilities (n, C)."""
    a = base.argmax(1)[rows]
    b = views[name].argmax(1)[rows]

    def log_odds(view: np.ndarray) -> np.ndarray:
        return np.clip(view[rows, b] - view[rows, a], -CUT, CUT)

    columns = [log_odds(base), log_odds(views[name]), base[rows, a], views[name][rows, b]]
    for other, view in views.items():
        if other != name:
            columns.append(log_odds(view))
    return np.stack(columns, axis=1)


def outcomes(
    base: np.ndarray, candidate: np.ndarray, rows: np.ndarray, y: np.ndarray
) -> np.ndarray:
    """Who is right on each of the changed `rows` (m,), by labels y (n,)."""
    right = np.full(len(rows), NEITHER)
    right[candidate.argmax(1)[rows] == y[rows]] = CANDIDATE
    right[base.argmax(1)[rows] == y[rows]] = BASE
    return right


def label_shift_descriptor(
    q: np.ndarray, q_bbse: np.ndarray, misfit_of_prior: float, n: int, changed: float
) -> np.ndarray:
    """The descriptors (4,) of BBSE and of mean matching."""
    distance = np.abs(q - q_bbse).sum()
    return np.array([corrected_entropy(q, n), distance, misfit_of_prior, np.log(changed + 0.01)])


def statistics_descriptor(
    q_after: np.ndarray, base: np.ndarray, candidate: np.ndarray, changed: float
) -> np.ndarray:
    """The BN descriptors (4,) of log-probabilities (n, C)."""
    n = len(base)
    fall = mean_entropy(base) - mean_entropy(candidate)
    return np.array([np.log(n), corrected_entropy(q_after, n), fall, np.log(changed + 0.01)])


def mean_entropy(log_p: np.ndarray) -> float:
    """The mean H of predictions (n, C)."""
    return float(-(np.exp(log_p) * log_p).sum(1).mean())
