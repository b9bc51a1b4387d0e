"""Superclass partition of CIFAR-100 (FedTTA, appendix B; pFedHN, section 5.4).

Each superclass is spread evenly over the same number of clients: 20 superclasses over 100 clients
give five clients a superclass, each with all five of its classes."""

import numpy as np

from partitions.partitioner import RowsPartitioner


class CoarsePartitioner(RowsPartitioner):
    """Client s·m + j is the j-th of the m clients of superclass s.

    ValueError if the clients are no multiple of the superclasses."""

    def deal(self, labels: np.ndarray) -> list[np.ndarray]:
        """The rows of a superclass, sorted by class, go to its clients in turn."""
        coarse = self.column("coarse")
        self._names = np.unique(coarse)
        each, rest = divmod(self.num_partitions, len(self._names))
        if rest or not each:
            raise ValueError(
                f"num-clients is {self.num_partitions}; it must be a multiple of the "
                f"{len(self._names)} superclasses"
            )
        dealt = []
        for name in self._names:
            rows = np.flatnonzero(coarse == name)
            rows = rows[np.argsort(labels[rows], kind="stable")]
            dealt += [rows[j::each] for j in range(each)]
        return dealt

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The client's superclass."""
        return {"coarse": str(self._names[client // (self.num_partitions // len(self._names))])}
