"""Self-organizing map (Kohonen, 1990): nodes (K, d) with positions (K, 2) on a grid.

The federated update is FedEmbed's (section 3.3.1): each node follows the user whose embedding is
most similar to it."""

from collections.abc import Sequence

import numpy as np
import scipy  # loads its modules on first use


def grid(count: int) -> np.ndarray:
    """Positions (count, 2) on a grid of rows × columns = count, as square as possible."""
    divisors = [r for r in range(1, int(count**0.5) + 1) if count % r == 0]
    columns = count // max(divisors)
    row_and_column = np.divmod(np.arange(count), columns)
    return np.stack(row_and_column, 1).astype(float)


def decayed(start: float, end: float, progress: float) -> float:
    """start (end / start)^progress: exponential decay over progress in [0, 1]."""
    return float(start * (end / start) ** progress)


def neighbourhood(positions: np.ndarray, radius: float) -> np.ndarray:
    """h (K, K) = exp(−‖r_i − r_j‖² / (2 radius²)) for the grid positions r."""
    square = ((positions[:, None] - positions[None]) ** 2).sum(-1)
    return np.exp(-square / (2 * radius**2))


def best_matching(values: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Index (n,) of the nearest node for values (n, d)."""
    square = (nodes**2).sum(1) - 2 * values @ nodes.T  # + ‖v‖², the same for all nodes
    return square.argmin(1)


def step(nodes: np.ndarray, value: np.ndarray, pull: np.ndarray) -> np.ndarray:
    """Kohonen's step: m_i + pull[c, i] (v − m_i), c the best matching node of v (d,)."""
    c = best_matching(value[None], nodes)[0]
    return nodes + pull[c][:, None] * (value - nodes)


def federated_step(
    nodes: np.ndarray, updates: Sequence[np.ndarray], scores: Sequence[np.ndarray]
) -> np.ndarray:
    """m_i + the update of the user whose score is best at node i; of ties the first user's.

    Each user has an update (K, d) and a score (K,) for every node."""
    best = np.stack(scores).argmax(0)
    return nodes + np.stack(updates)[best, np.arange(len(nodes))]


def is_of_one_user(
    nodes: np.ndarray, pull: np.ndarray, update: np.ndarray, score: np.ndarray
) -> bool:
    """Whether update and score can be those of a single embedding v.

    With the best node c the update must be pull[c] (v − m), and the score −‖v − m‖, up to rounding.
    A false score could win every node of the map."""
    c = score.argmax()
    v = nodes[c] + update[c] / pull[c, c]  # the embedding that explains the update of node c
    tolerance = 1e-3 * (1 + np.abs(v).max())
    update_error = np.abs(update - pull[c][:, None] * (v - nodes)).max()
    score_error = np.abs(score + np.linalg.norm(nodes - v, axis=1)).max()
    return bool(update_error <= tolerance and score_error <= tolerance)


def successors(overlap: np.ndarray) -> np.ndarray:
    """For each old node the index of the new node that gets its head (K,).

    `overlap` (K, K) counts users by (old, new) node. The Hungarian method finds the assignment with
    the most common users; of equal assignments, the one that leaves most nodes in place."""
    stay = np.eye(len(overlap)) / (2 * len(overlap))  # breaks ties: sums to less than one user
    _, new = scipy.optimize.linear_sum_assignment(overlap + stay, maximize=True)
    return new
