"""Dirichlet partition over the official split (Ye et al., UPFL, section 4.3 and Table 2).

Training clients share the training split, novel clients the test split. For each class the clients'
shares are drawn from Dir(α). Each of the two groups has its own α and its own generator. Sizes
differ, and a novel client may get no samples. Departs from the authors' code: every sample is
assigned, whatever the rounding; where a training client gets fewer than two samples, with which
that code stops, the training clients' shares are drawn again."""

from collections.abc import Sequence

import numpy as np

from fedapps.common.seeds import seed_of
from partitions.cache import TEST
from partitions.rules.partitioner import RowsPartitioner

MIN_SAMPLES = 2  # of a training client
MAX_DRAWS = 100


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
        rows_of = [np.empty(0, np.int64) for _ in self._novel]
        for novel, alpha in enumerate(self._alphas):
            clients = np.flatnonzero(self._novel == novel)
            if not len(clients):
                continue
            rows_by_class = []
            for label in np.unique(labels):
                rows_by_class.append(np.flatnonzero((labels == label) & (test == novel)))
            generator = np.random.default_rng(seed_of(self._seed, "shares", novel))
            for _ in range(MAX_DRAWS):
                drawn = _by_shares(rows_by_class, len(clients), alpha, generator)
                if novel or min(map(len, drawn)) >= MIN_SAMPLES:
                    break
            for client, rows in zip(clients, drawn, strict=True):
                rows_of[client] = rows
        return rows_of


def _by_shares(
    rows_by_class: Sequence[np.ndarray], count: int, alpha: float, generator: np.random.Generator
) -> list[np.ndarray]:
    """The rows of `count` clients, whose shares of each class are from Dir(α)."""
    parts_of: list[list[np.ndarray]] = [[] for _ in range(count)]
    for rows in rows_by_class:
        p = generator.dirichlet(np.full(count, alpha))
        ends = np.round(np.cumsum(p) * len(rows)).astype(int)[:-1]
        for parts, part in zip(parts_of, np.split(rows, ends), strict=True):
            parts.append(part)
    return [np.concatenate(parts) for parts in parts_of]
