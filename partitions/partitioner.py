"""The base of the rules that flwr-datasets has not."""

from abc import abstractmethod

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from partitions.deals import TEST, TRAIN, VALIDATION


class RowsPartitioner(Partitioner):
    """Deals the rows of its dataset out once; a subclass says how, in `deal`.

    A rule is `pooled` if it divides the training, validation and test rows (column "part") apart;
    else each client splits what it was dealt by itself."""

    pooled = False

    def __init__(self, num_partitions: int) -> None:
        super().__init__()
        self._num = num_partitions
        self._rows: list[np.ndarray] = []

    @property
    def num_partitions(self) -> int:
        """Number of clients."""
        return self._num

    @abstractmethod
    def deal(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows of each client, by the labels (n,) of all rows, which are in random order."""

    def load_partition(self, partition_id: int) -> Dataset:
        """The samples of one client."""
        return self.dataset.select(self.rows(partition_id))

    def rows(self, client: int) -> np.ndarray:
        """Positions in the dataset of one client's samples."""
        self._rows = self._rows or self.deal(self.column("label"))
        return self._rows[client]

    def column(self, name: str) -> np.ndarray:
        """A column (n,). ValueError naming the dataset's columns if there is no such."""
        if name not in self.dataset.column_names:
            natural = set(self.dataset.column_names) - {"label", "row", "part"}
            raise ValueError(
                f"the dataset has no column {name!r}; it has {', '.join(sorted(natural)) or 'none'}"
            )
        return np.asarray(self.dataset.with_format("numpy")[name][:])

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """What there is to say of a client, for figures."""
        return {}


def deal_by_shares(labels: np.ndarray, parts: np.ndarray, shares: np.ndarray) -> list[np.ndarray]:
    """Each class of each part cut by the clients' `shares` (num_clients, num_classes).

    A class's column sums to one, or to zero if nobody holds it; rows are in random order."""
    dealt: list[list[np.ndarray]] = [[] for _ in shares]
    for c, column in zip(np.unique(labels), shares.T, strict=True):
        if not column.sum():
            continue
        for part in (TRAIN, VALIDATION, TEST):
            rows = np.flatnonzero((labels == c) & (parts == part))
            ends = np.round(np.cumsum(column) * len(rows)).astype(int)[:-1]
            for mine, cut in zip(dealt, np.split(rows, ends), strict=True):
                mine.append(cut)
    return [np.concatenate([np.empty(0, np.int64), *mine]) for mine in dealt]
