"""Self-organizing map (Kohonen, 1990): nodes (K, d) with positions (K, 2) on a grid.

The federated update is FedEmbed's (section 3.3.1): each node follows the user whose embedding is
most similar to it."""

from collections.abc import Sequence

import numpy as np
import scipy  # loads its modules on first use


def grid(count: int) -> np.ndarray:
    """Positions (count, 2) on a grid of rows × columns = count, as square as possible."""
    rows = max(r for r in range(1, int(count**0.5) + 1) if count % r == 0)
    return np.stack(np.divmod(np.arange(count), count // rows), 1).astype(float)


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
    """m_i + the update (K, d) of the user whose score (K,) is best at node i; ties: the first."""
    best = np.stack(scores).argmax(0)
    return nodes + np.stack(updates)[best, np.arange(len(nodes))]


def is_of_one_user(
    nodes: np.ndarray, pull: np.ndarray, update: np.ndarray, score: np.ndarray
) -> bool:
    """Whether some v gives this update, pull[c] (v − m), and score, −‖v − m‖, c being the best
    node. A false score would win every node of the map."""
    c = score.argmax()
    v = nodes[c] + update[c] / pull[c, c]
    slack = 1e-3 * (1 + np.abs(v).max())
    moved = np.abs(update - pull[c][:, None] * (v - nodes)).max() <= slack
    return bool(moved and np.abs(score + np.linalg.norm(nodes - v, axis=1)).max() <= slack)


def successors(overlap: np.ndarray) -> np.ndarray:
    """For each old node the new one that takes over its head, with the most users in common.

    `overlap` (K, K) counts users by (old, new) node. The Hungarian method; of equal assignments
    the one that leaves most nodes in place."""
    stay = np.eye(len(overlap)) / (2 * len(overlap))  # sums to less than one user
    _, new = scipy.optimize.linear_sum_assignment(overlap + stay, maximize=True)
    return new
