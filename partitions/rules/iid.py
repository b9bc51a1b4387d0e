"""A random subset of the data, partitioned over the clients, as in FedTTA's rotated MNIST."""

import numpy as np

from partitions.rules.partitioner import RowsPartitioner
from partitions.rules.pathological import PathologicalPartitioner


class SubsetIidPartitioner(RowsPartitioner):
    """`samples` rows, IID over the clients, whose sizes differ by at most one.

    With `class_shards` > 0 each client gets that number of shards of random classes instead, as in
    the code of FedTTA's authors. Raises ValueError if `samples` exceeds the data, or is smaller
    than the number of clients."""

    def __init__(
        self, num_partitions: int, samples: int, class_shards: int = 0, seed: int = 0
    ) -> None:
        super().__init__(num_partitions)
        if samples < num_partitions:
            raise ValueError(
                f"partition.samples is {samples}, fewer than num-clients={num_partitions}"
            )
        self._samples = samples
        self._class_shards = class_shards
        self._seed = seed

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """The first `samples` rows; the rows are in random order."""
        if self._samples > len(labels):
            raise ValueError(f"partition.samples is {self._samples}, but there are {len(labels)}")
        if not self._class_shards:
            return np.array_split(np.arange(self._samples), self.num_partitions)
        rule = PathologicalPartitioner(
            self.num_partitions, self._class_shards, self._seed, equal_sizes=False
        )
        return rule.assign(labels[: self._samples])
