"""Projection on the probability simplex."""

import numpy as np


def project(v: np.ndarray, mass: float = 1.0) -> np.ndarray:
    """The point of {λ ≥ 0, Σλ = mass} nearest to v (n,) (Duchi et al., ICML 2008, Fig. 1)."""
    u = np.sort(v)[::-1]
    excess = (np.cumsum(u) - mass) / np.arange(1, len(v) + 1)
    num_positive = max(1, int((u > excess).sum()))  # would be 0 only by rounding
    return np.maximum(v - excess[num_positive - 1], 0.0)
