"""Dirichlet partitions, whose training and novel clients may have different concentrations.

By class proportions (Hsu et al., 2019): client i has the proportions q_i ~ Dir(α). Clients hold
equally many samples. When a class has no samples left, a client draws from its other classes by its
proportions.

By shares (pFedHN, section 5.3), for distant novel clients: client i draws p_i ~ Dir(α_i) and gets
the share p̂_ij = p_ij / Σ_k p_kj of class j's training, validation and test rows."""

from collections.abc import Sequence

import numpy as np

from fedapps.common.seeds import seed_of
from partitions.rules.partitioner import RowsPartitioner, assign_by_shares


class DirichletPartitioner(RowsPartitioner):
    """`alphas` holds the concentration of each client; all must be positive."""

    def __init__(self, alphas: Sequence[float], seed: int) -> None:
        super().__init__(len(alphas))
        if min(alphas) <= 0:
            raise ValueError(f"alpha is {min(alphas)}; a Dirichlet concentration must be > 0")
        self._alphas = alphas
        self._seed = seed

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """⌊N / n⌋ rows for each client, by its proportions."""
        generator = np.random.default_rng(self._seed)
        return rows_by_alphas(labels, self._alphas, len(labels) // len(self._alphas), generator)


def rows_by_alphas(
    labels: np.ndarray, alphas: Sequence[float], size: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """`size` rows for each client, by proportions from Dir(α) with its concentration in `alphas`;
    no row twice."""
    pools = []
    for label in np.unique(labels):
        pools.append(generator.permutation(np.flatnonzero(labels == label)))
    remaining = np.array([len(pool) for pool in pools])
    rows_of: list[np.ndarray] = [np.array([], dtype=int)] * len(alphas)
    # In random order, since the last clients find classes without samples.
    for client in generator.permutation(len(alphas)):
        q = generator.dirichlet(np.full(len(pools), alphas[client]))
        counts = _draw(q, remaining, size, generator)
        parts = []
        for pool, end, count in zip(pools, remaining, counts, strict=True):
            parts.append(pool[end - count : end])
        remaining -= counts
        rows_of[client] = np.concatenate(parts)
    return rows_of


def _draw(
    q: np.ndarray, remaining: np.ndarray, size: int, generator: np.random.Generator
) -> np.ndarray:
    """Samples of each class (C,) ~ Multinomial(size, q), but at most the `remaining` ones."""
    counts = np.zeros_like(remaining)
    missing = size
    while missing > 0:
        is_open = remaining > counts
        p = np.where(is_open, q, 0.0)
        if p.sum() == 0:  # none of the client's classes has samples: draw from the others
            p = is_open.astype(float)
        counts += generator.multinomial(missing, p / p.sum())
        counts = np.minimum(counts, remaining)
        missing = size - counts.sum()
    return counts


class NormalizedDirichletPartitioner(DirichletPartitioner):
    """By shares. A client's p does not depend on the other clients' concentrations."""

    pooled = True

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows by the shares p̂."""
        num_classes = len(np.unique(labels))
        p = []
        for client, alpha in enumerate(self._alphas):
            generator = np.random.default_rng(seed_of(self._seed, "shares", client))
            p.append(generator.dirichlet(np.full(num_classes, alpha)))
        total = np.maximum(np.sum(p, axis=0), 1e-300)
        return assign_by_shares(labels, self.column("part"), np.stack(p) / total)
