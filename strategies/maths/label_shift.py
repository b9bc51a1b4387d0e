"""The training clients' labels, from sums of their counts."""

import numpy as np


def prior(counts: np.ndarray) -> np.ndarray:
    """π (C,) from label counts (C,) plus one, so no class has probability 0."""
    counts = np.maximum(counts, 0) + 1
    return np.asarray(counts / counts.sum(), np.float32)


def conditional(counts: np.ndarray) -> np.ndarray:
    """K_ab = P(predicted a | label b) from counts (C, C).

    A label without a sample counts as always recognised."""
    counts = np.maximum(counts, 0)
    counts = counts + np.diag(counts.sum(0) == 0)
    return np.asarray(counts / counts.sum(0), np.float32)
