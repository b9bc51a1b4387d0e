"""Dirichlet partition (Hsu et al., 2019): client i's class proportions are q_i ~ Dir(α).

Training and novel clients may have different concentrations. Clients hold equally many samples;
when a class runs out, a client draws from its other classes by its proportions."""

from collections.abc import Sequence

import numpy as np

from partitions.partitioner import RowsPartitioner


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
