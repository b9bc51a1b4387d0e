"""Dirichlet partitions, whose training and novel clients may have different concentrations.

By class proportions (Hsu et al., 2019): client i's are q_i ~ Dir(α). Clients hold equally many
samples; when a class runs out, a client draws from its other classes by its proportions.

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
        self._alphas, self._seed = alphas, seed

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """N / n rows a client, by its proportions."""
        generator = np.random.default_rng(self._seed)
        pools = [generator.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
        left = np.array([len(pool) for pool in pools])
        size = len(labels) // len(self._alphas)
        clients: list[np.ndarray] = [np.array([], dtype=int)] * len(self._alphas)
        for client in generator.permutation(len(self._alphas)):  # in random order
            q = generator.dirichlet(np.full(len(pools), self._alphas[client]))
            parts = []
            for label, count in enumerate(_draw(q, left, size, generator)):
                parts.append(pools[label][left[label] - count : left[label]])
                left[label] -= count
            clients[client] = np.concatenate(parts)
        return clients


def _draw(q: np.ndarray, left: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """Counts per class ~ Multinomial(size, q), at most `left`."""
    counts = np.zeros_like(left)
    while (missing := size - counts.sum()) > 0:
        open_ = left > counts
        p = np.where(open_, q, 0.0)
        p = p if p.sum() > 0 else open_.astype(float)  # its classes are used up: any other
        counts = np.minimum(counts + generator.multinomial(missing, p / p.sum()), left)
    return counts


class NormalizedDirichletPartitioner(DirichletPartitioner):
    """By shares. A client's p does not depend on the concentrations of others."""

    pooled = True

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows by the shares p̂."""
        num_classes, p = len(np.unique(labels)), []
        for client, alpha in enumerate(self._alphas):
            generator = np.random.default_rng(seed_of(self._seed, "shares", client))
            p.append(generator.dirichlet(np.full(num_classes, alpha)))
        total = np.maximum(np.sum(p, axis=0), 1e-300)
        return assign_by_shares(labels, self.column("part"), np.stack(p) / total)
