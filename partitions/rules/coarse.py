"""Superclass partition of CIFAR-100 (FedTTA, appendix B; pFedHN, section 5.4).

Each superclass is spread evenly over equally many clients: with 20 superclasses and 100 clients
each has five clients, which hold all five of its classes."""

import numpy as np

from partitions.rules.partitioner import RowsPartitioner


class CoarsePartitioner(RowsPartitioner):
    """Client s·m + j is the j-th of the m clients of superclass s.

    ValueError if the clients are no multiple of the superclasses."""

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """The rows of a superclass, sorted by class, in turn to its clients."""
        coarse = self.column("coarse")
        self._names = np.unique(coarse)
        each, rest = divmod(self.num_partitions, len(self._names))
        if rest or not each:
            raise ValueError(
                f"num-clients is {self.num_partitions}; it must be a multiple of the "
                f"{len(self._names)} superclasses"
            )
        clients = []
        for name in self._names:
            rows = np.flatnonzero(coarse == name)
            rows = rows[np.argsort(labels[rows], kind="stable")]
            clients += [rows[j::each] for j in range(each)]
        return clients

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The client's superclass."""
        return {"coarse": str(self._names[client // (self.num_partitions // len(self._names))])}
