"""The base of the rules that flwr-datasets lacks."""

from abc import abstractmethod
from typing import Any

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from fedapps.common.class_members import check_members
from partitions.cache import TEST, TRAIN, VALIDATION


class RowsPartitioner(Partitioner):
    """Assigns rows of its dataset to clients; a subclass says how, in `assign`.

    A `pooled` rule partitions training, validation and test rows (column "part") separately. For
    other rules each client's rows are split afterwards."""

    pooled = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError for a name that seems to be a misspelling, see `class_members`."""
        super().__init_subclass__(**options)
        check_members(cls, {})

    def __init__(self, num_partitions: int) -> None:
        super().__init__()
        self._num = num_partitions
        self._rows: list[np.ndarray] = []

    @property
    def num_partitions(self) -> int:
        """Number of clients."""
        return self._num

    @abstractmethod
    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows of each client, from the labels (n,) of all rows, which are in random order."""

    def load_partition(self, partition_id: int) -> Dataset:
        """The samples of one client."""
        return self.dataset.select(self.rows(partition_id))

    def rows(self, client: int) -> np.ndarray:
        """Positions in the dataset of one client's samples."""
        self._rows = self._rows or self.assign(self.column("label"))
        return self._rows[client]

    def column(self, name: str) -> np.ndarray:
        """A column (n,). Raises ValueError with the dataset's columns if it is missing."""
        if name not in self.dataset.column_names:
            natural = set(self.dataset.column_names) - {"label", "row", "part"}
            raise ValueError(
                f"the dataset has no column {name!r}; it has {', '.join(sorted(natural)) or 'none'}"
            )
        return np.asarray(self.dataset.with_format("numpy")[name][:])

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """Attributes of a client, for figures."""
        return {}


def assign_by_shares(labels: np.ndarray, parts: np.ndarray, shares: np.ndarray) -> list[np.ndarray]:
    """Each class of each part, split by the clients' `shares` (num_clients, num_classes).

    A class's column sums to one, or to zero if no client holds it; rows are in random order."""
    rows_of: list[list[np.ndarray]] = [[] for _ in shares]
    for c, column in zip(np.unique(labels), shares.T, strict=True):
        if not column.sum():
            continue
        for part in (TRAIN, VALIDATION, TEST):
            rows = np.flatnonzero((labels == c) & (parts == part))
            ends = np.round(np.cumsum(column) * len(rows)).astype(int)[:-1]
            for parts_of, part_rows in zip(rows_of, np.split(rows, ends), strict=True):
                parts_of.append(part_rows)
    return [np.concatenate([np.empty(0, np.int64), *parts_of]) for parts_of in rows_of]
