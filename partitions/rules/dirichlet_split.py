"""Dirichlet partition over the official split (Ye et al., UPFL, section 4.3 and Table 2).

Training clients share the training split, novel clients the test split. For each class the clients'
shares are drawn from Dir(α). Each of the two groups has its own α and its own generator. Sizes
differ, and a novel client may get no samples. Departs from the authors' code: every sample is
assigned, whatever the rounding."""

import numpy as np

from fedapps.common.seeds import seed_of
from partitions.cache import TEST
from partitions.rules.partitioner import RowsPartitioner


class SplitDirichletPartitioner(RowsPartitioner):
    """`alpha` and `novel_alpha` are the concentrations for training and `novel` (n,) clients; both
    must be positive."""

    def __init__(self, novel: np.ndarray, alpha: float, novel_alpha: float, seed: int) -> None:
        super().__init__(len(novel))
        if min(alpha, novel_alpha) <= 0:
            raise ValueError(
                f"alpha is {alpha}, novel-alpha {novel_alpha}; Dirichlet concentrations must be > 0"
            )
        self._novel = novel
        self._alphas = (alpha, novel_alpha)
        self._seed = seed

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows of each split by the shares of its clients."""
        test = self.column("part") == TEST
        if self._novel.any() and not test.any():
            raise ValueError("the dataset has no test split for novel clients")
        rows_of: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in self._novel]
        for novel, alpha in enumerate(self._alphas):
            clients = np.flatnonzero(self._novel == novel)
            if not len(clients):
                continue
            generator = np.random.default_rng(seed_of(self._seed, "shares", novel))
            for label in np.unique(labels):
                rows = np.flatnonzero((labels == label) & (test == novel))
                p = generator.dirichlet(np.full(len(clients), alpha))
                ends = np.round(np.cumsum(p) * len(rows)).astype(int)[:-1]
                for client, part in zip(clients, np.split(rows, ends), strict=True):
                    rows_of[client].append(part)
        return [np.concatenate(parts) for parts in rows_of]
