"""A random part of the data over clients, as FedTTA's rotated MNIST has it."""

import numpy as np

from partitions.rules.partitioner import RowsPartitioner
from partitions.rules.pathological import PathologicalPartitioner


class SubsetIidPartitioner(RowsPartitioner):
    """`samples` rows, IID over the clients; sizes differ by one at most. With `class_shards`, a
    client gets so many shards of random classes, as in the code of FedTTA's authors.

    ValueError if there are not so many rows, or fewer than clients."""

    def __init__(
        self, num_partitions: int, samples: int, class_shards: int = 0, seed: int = 0
    ) -> None:
        super().__init__(num_partitions)
        if samples < num_partitions:
            raise ValueError(
                f"partition.samples is {samples}, fewer than num-clients={num_partitions}"
            )
        self._samples, self._shards, self._seed = samples, class_shards, seed

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """The first rows, which are in random order."""
        if self._samples > len(labels):
            raise ValueError(f"partition.samples is {self._samples}, but there are {len(labels)}")
        if not self._shards:
            return np.array_split(np.arange(self._samples), self.num_partitions)
        rule = PathologicalPartitioner(self.num_partitions, self._shards, self._seed, False)
        return rule.assign(labels[: self._samples])
