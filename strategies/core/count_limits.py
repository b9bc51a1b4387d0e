"""Limits on one client's share in sums over clients, relative to the other clients' answers.

Counts c_i (C,) by label, or (C, C) by predicted class and label, are the weights of a sum. Their
total is limited to `ratio` times the lower median of the totals, as sample counts are.

An answer of zeros adds nothing to a sum, and is no measure for the others: where few clients have
something to count, a liar among them is compared with these.

*Confusion matrices* are compared by label: K_i[:, b] are the shares of predictions for label b, and
M[:, b] is the median over the clients that have it, scaled to sum 1. The distance of a client is
δ_i = Σ_b n_ib ‖K_i[:, b] − M[:, b]‖₁ / (2 Σ_b n_ib), a share of its samples. Beyond
max(`ratio` · median δ, `ALLOWED`) the matrix is moved towards M, to that distance. So clients may
have other labels, and a weaker network where theirs differ, but none can claim other mistakes.
Labels that fewer than `MIN_REPLIES_FOR_QUARTILE` clients have are not compared.

*Other sums* of several arrays x_i: with the coordinate-wise median m and δ_i = ‖x_i − m‖, an
answer becomes m + λ_i (x_i − m). λ_i is the least of min(1, `ratio` · lower median δ / δ_i) over
its arrays, so that these fit together. A lie then moves a sum by a few times what one honest client
does.

*Histograms*, where the server takes a high quantile of their sum: the ones that reach furthest do
not count.

What is within the limits is not changed; negative counts become 0."""

from collections.abc import Sequence

import numpy as np

from clients.core.arrays import Arrays
from strategies.core.limits import MIN_REPLIES_FOR_NORMS, MIN_REPLIES_FOR_QUARTILE, lower_quantile

COLUMNS = 65536  # entries of all answers that are compared at once, which bounds the memory
LIARS = 0.1  # the share of the clients whose highest answers do not count
ALLOWED = 0.1  # share of samples; with few samples most honest matrices have no mistake


def bounded_totals(counts: Sequence[np.ndarray], ratio: float) -> list[np.ndarray]:
    """The counts, negative ones as 0, each scaled down to a total of at most `ratio` times the
    lower median of the totals."""
    positive = [np.maximum(c, 0) for c in counts]
    totals = [float(c.sum()) for c in positive]
    measured = [total for total in totals if total > 0]
    if not measured:
        return positive
    limit = ratio * lower_quantile(measured)
    bounded = []
    for c, total in zip(positive, totals, strict=True):
        factor = 1.0
        if total > limit:
            factor = limit / total
        bounded.append(factor * c)
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


def bounded_deviations(answers: Sequence[Arrays], ratio: float) -> list[Arrays]:
    """The answers, none farther from the median answer than `ratio` times the usual distance. Fewer
    than `MIN_REPLIES_FOR_NORMS` answers, and arrays in which most clients agree, have no limit."""
    places = [i for i, answer in enumerate(answers) if any(map(np.any, answer.values()))]
    bounded = list(answers)
    if len(places) < MIN_REPLIES_FOR_NORMS:
        return bounded
    for place, answer in zip(places, _bounded([answers[i] for i in places], ratio), strict=True):
        bounded[place] = answer
    return bounded


def _bounded(answers: Sequence[Arrays], ratio: float) -> list[Arrays]:
    """As `bounded_deviations`, for answers that all add to the sums."""
    medians: Arrays = {}
    shares = np.ones(len(answers))  # λ
    for name in answers[0]:
        median, distances = _distances([answer[name] for answer in answers])
        medians[name] = median
        limit = ratio * lower_quantile(distances.tolist())
        far = distances > limit
        if limit > 0 and far.any():
            shares[far] = np.minimum(shares[far], limit / distances[far])
    bounded = []
    for answer, share in zip(answers, shares, strict=True):
        if share == 1:
            bounded.append(answer)
            continue
        moved = {name: m + share * (answer[name] - m) for name, m in medians.items()}
        bounded.append(moved)
    return bounded


def _distances(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The median of every entry, and the distance (clients,) of each array from it."""
    flat = [np.asarray(array, float).ravel() for array in arrays]
    medians = []
    squares = np.zeros(len(flat))
    for start in range(0, len(flat[0]), COLUMNS):
        part = np.stack([array[start : start + COLUMNS] for array in flat])
        median = np.median(part, axis=0)
        squares += np.square(part - median).sum(1)
        medians.append(median)
    return np.concatenate(medians).reshape(arrays[0].shape), np.sqrt(squares)


def num_trimmed(clients: int) -> int:
    """How many of the clients' answers do not count: a tenth, one at least."""
    return max(1, round(LIARS * clients))


def without_highest(histograms: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The histograms (bins,), as zeros where the highest bin with a count is among the highest
    tenth of all clients', one at least. Among fewer than `MIN_REPLIES_FOR_NORMS` all count."""
    if len(histograms) < MIN_REPLIES_FOR_NORMS:
        return list(histograms)
    highest = []
    for histogram in histograms:
        occupied = np.flatnonzero(histogram > 0)
        highest.append(int(occupied[-1]) if len(occupied) else -1)
    order = np.argsort(highest, kind="stable")
    left_out = set(order[-num_trimmed(len(histograms)) :].tolist())
    result = []
    for place, histogram in enumerate(histograms):
        result.append(np.zeros_like(histogram) if place in left_out else histogram)
    return result
