"""A random part of the data over clients of equal size, as FedTTA's rotated MNIST has it."""

import numpy as np

from partitions.partitioner import RowsPartitioner


class SomePartitioner(RowsPartitioner):
    """`samples` rows, IID over the clients; sizes differ by one at most.

    ValueError if there are not so many rows, or fewer than clients."""

    def __init__(self, num_partitions: int, samples: int) -> None:
        super().__init__(num_partitions)
        if samples < num_partitions:
            raise ValueError(
                f"partition.samples is {samples}, fewer than num-clients={num_partitions}"
            )
        self._samples = samples

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """The first rows, which are in random order."""
        if self._samples > len(labels):
            raise ValueError(f"partition.samples is {self._samples}, but there are {len(labels)}")
        return np.array_split(np.arange(self._samples), self.num_partitions)
