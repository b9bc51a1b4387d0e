"""Dirichlet partition over the official split (Ye et al., UPFL, section 4.3 and Table 2).

Each class is dealt by shares over the clients that are drawn from Dir(α): training clients get
samples of the dataset's training split, novel ones of its test split, each group with an α of its
own and from a generator of its own. Sizes differ, and a novel client may be left without samples.
Departs from the authors' code: rounding leaves no sample over."""

import numpy as np

from partitions.deals import TEST
from partitions.partitioner import RowsPartitioner
from partitions.seeds import seed_of


class SplitDirichletPartitioner(RowsPartitioner):
    """`alpha` and `novel_alpha` are the concentrations of the clients that are not, and are,
    `novel` (n,); both must be positive."""

    def __init__(self, novel: np.ndarray, alpha: float, novel_alpha: float, seed: int) -> None:
        super().__init__(len(novel))
        if min(alpha, novel_alpha) <= 0:
            raise ValueError(
                f"alpha is {alpha}, novel-alpha {novel_alpha}; Dirichlet concentrations must be > 0"
            )
        self._novel, self._alphas, self._seed = novel, (alpha, novel_alpha), seed

    def deal(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows of each split by the shares of its clients."""
        test = self.column("part") == TEST
        if self._novel.any() and not test.any():
            raise ValueError("the dataset has no test split to deal to novel clients")
        dealt: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in self._novel]
        for novel, alpha in enumerate(self._alphas):
            clients = np.flatnonzero(self._novel == novel)
            generator = np.random.default_rng(seed_of(self._seed, "shares", novel))
            for label in np.unique(labels) if len(clients) else ():
                rows = np.flatnonzero((labels == label) & (test == novel))
                p = generator.dirichlet(np.full(len(clients), alpha))
                ends = np.round(np.cumsum(p) * len(rows)).astype(int)[:-1]
                for client, mine in zip(clients, np.split(rows, ends), strict=True):
                    dealt[client].append(mine)
        return [np.concatenate(parts) for parts in dealt]
