"""The base class of the partition rules that flwr-datasets does not have."""

from abc import abstractmethod
from typing import Any

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from fedapps.common.class_members import check_members
from partitions.cache import TEST, TRAIN, VALIDATION


class RowsPartitioner(Partitioner):
    """Assigns rows of its dataset to clients. A subclass overrides `assign`.

    A `pooled` rule partitions training, validation and test rows (column "part") separately. For
    any other rule, each client's rows are split into these parts afterwards."""

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
            known = ", ".join(sorted(natural)) or "none"
            raise ValueError(f"the dataset has no column {name!r}; it has {known}")
        return np.asarray(self.dataset.with_format("numpy")[name][:])

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """Facts about a client that figures show."""
        return {}


def assign_by_shares(labels: np.ndarray, parts: np.ndarray, shares: np.ndarray) -> list[np.ndarray]:
    """Rows of each client, whose `shares` (num_clients, num_classes) hold for every part.

    `labels` (n,) and `parts` (n,) are those of all rows, which are in random order. A column of
    `shares` sums to one, or to zero if no client holds the class."""
    # An empty array to begin with: a client without rows gets row numbers of the right type.
    pieces_of: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in shares]
    for label, class_shares in zip(np.unique(labels), shares.T, strict=True):
        if not class_shares.sum():
            continue
        for part in (TRAIN, VALIDATION, TEST):
            rows = np.flatnonzero((labels == label) & (parts == part))
            ends = np.round(np.cumsum(class_shares) * len(rows)).astype(int)[:-1]
            for pieces, client_rows in zip(pieces_of, np.split(rows, ends), strict=True):
                pieces.append(client_rows)
    return [np.concatenate(pieces) for pieces in pieces_of]
