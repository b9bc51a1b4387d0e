"""Partition of pFedHN, section 5.3: how far may a novel client's distribution lie?

Client i draws p_i ~ Dir(α_i), α apart for training and novel clients; p̂_ij = p_ij / Σ_k p_kj of
class j's samples are its own, of the training, validation and test rows alike."""

from collections.abc import Sequence

import numpy as np

from partitions.partitioner import RowsPartitioner, deal_by_shares


class NormalizedDirichletPartitioner(RowsPartitioner):
    """`alphas` holds the concentration of each client; all must be positive."""

    pooled = True

    def __init__(self, alphas: Sequence[float], seed: int) -> None:
        super().__init__(len(alphas))
        if min(alphas) <= 0:
            raise ValueError(f"alpha is {min(alphas)}; a Dirichlet concentration must be > 0")
        self._alphas, self._seed = alphas, seed

    def deal(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows by the shares p̂."""
        generator = np.random.default_rng(self._seed)
        num_classes = len(np.unique(labels))
        p = np.stack([generator.dirichlet(np.full(num_classes, a)) for a in self._alphas])
        return deal_by_shares(labels, self.column("part"), p / np.maximum(p.sum(0), 1e-300))
