"""Limits on one client's share in sums of counts, relative to the other clients' counts.

Counts c_i (C,) by label, or (C, C) by predicted class and label, are the weights of a sum. Their
total is limited to `ratio` times the lower median of the totals, as sample counts are.

*Confusion matrices* are compared by label: K_i[:, b] are the shares of predictions for label b, and
M[:, b] is the median over the clients that have it, scaled to sum 1. The distance of a client is
δ_i = Σ_b n_ib ‖K_i[:, b] − M[:, b]‖₁ / (2 Σ_b n_ib), a share of its samples. Beyond
max(`ratio` · median δ, `ALLOWED`) the matrix is moved towards M, to that distance. So clients may
have other labels, and a weaker network where theirs differ, but none can claim other mistakes.
Labels that fewer than `MIN_REPLIES_FOR_QUARTILE` clients have are not compared.

Counts within the limits are not changed; negative ones become 0."""

from collections.abc import Sequence

import numpy as np

from strategies.core.limits import MIN_REPLIES_FOR_QUARTILE, lower_quantile

ALLOWED = 0.1  # share of samples; with few samples most honest matrices have no mistake


def bounded_totals(counts: Sequence[np.ndarray], ratio: float) -> list[np.ndarray]:
    """The counts, negative ones as 0, each scaled down to a total of at most `ratio` times the
    lower median of the totals."""
    positive = [np.maximum(c, 0) for c in counts]
    totals = [float(c.sum()) for c in positive]
    limit = ratio * lower_quantile(totals)
    bounded = []
    for c, total in zip(positive, totals, strict=True):
        # A limit of 0 is no measure: most clients sent none.
        if 0 < limit < total:
            bounded.append(c * (limit / total))
        else:
            bounded.append(c)
    return bounded


def bounded_confusions(counts: Sequence[np.ndarray], ratio: float) -> list[np.ndarray]:
    """The counts (C, C) by predicted class and label, none far from the median matrix."""
    stacked = np.stack([np.maximum(c, 0) for c in counts]).astype(float)  # (clients, C, C)
    totals = stacked.sum(1)  # (clients, C)
    has = totals > 0
    shares = stacked / np.maximum(totals, 1e-12)[:, None]
    usual = np.zeros(stacked.shape[1:])
    compared = np.zeros(stacked.shape[2], bool)
    for label in range(stacked.shape[2]):
        if has[:, label].sum() < MIN_REPLIES_FOR_QUARTILE:
            continue
        median = np.median(shares[has[:, label], :, label], axis=0)
        if median.sum() > 0:
            usual[:, label] = median / median.sum()
            compared[label] = True
    differences = np.where(compared & has[:, None], shares - usual, 0.0)
    weighted = np.abs(differences).sum(1) * totals
    distances = weighted.sum(1) / np.maximum(2 * totals.sum(1), 1e-12)
    limit = max(ratio * lower_quantile(distances.tolist()), ALLOWED)
    bounded = []
    for i, c in enumerate(counts):
        if distances[i] <= limit:
            bounded.append(np.maximum(c, 0))
            continue
        excess = (1 - limit / distances[i]) * differences[i]
        bounded.append(stacked[i] - excess * totals[i])
    return bounded
