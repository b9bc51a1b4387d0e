"""Partition of pFedHN, section 5.3: novel clients with distant distributions.

Client i draws p_i ~ Dir(α_i), with different α for training and novel clients. It gets the share
p̂_ij = p_ij / Σ_k p_kj of class j's samples, the same of training, validation and test rows."""

from collections.abc import Sequence

import numpy as np

from partitions.partitioner import RowsPartitioner, assign_by_shares
from partitions.seeds import seed_of


class NormalizedDirichletPartitioner(RowsPartitioner):
    """`alphas` holds the concentration of each client; all must be positive. A client's p does not
    depend on the concentrations of others."""

    pooled = True

    def __init__(self, alphas: Sequence[float], seed: int) -> None:
        super().__init__(len(alphas))
        if min(alphas) <= 0:
            raise ValueError(f"alpha is {min(alphas)}; a Dirichlet concentration must be > 0")
        self._alphas, self._seed = alphas, seed

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows by the shares p̂."""
        num_classes, p = len(np.unique(labels)), []
        for client, alpha in enumerate(self._alphas):
            generator = np.random.default_rng(seed_of(self._seed, "shares", client))
            p.append(generator.dirichlet(np.full(num_classes, alpha)))
        total = np.maximum(np.sum(p, axis=0), 1e-300)
        return assign_by_shares(labels, self.column("part"), np.stack(p) / total)
