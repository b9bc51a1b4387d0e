"""Superclass partition of CIFAR-100 (FedTTA, appendix B; pFedHN, section 5.4).

Every superclass belongs to equally many clients, which share its samples evenly. With 20
superclasses and 100 clients, each has five clients, and every client holds all its five classes."""

import numpy as np

from partitions.rules.partitioner import RowsPartitioner


class CoarsePartitioner(RowsPartitioner):
    """Client s·m + j is the j-th of the m clients of superclass s.

    ValueError if the clients are no multiple of the superclasses."""

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """The rows of a superclass, sorted by class, in turn to its clients."""
        coarse = self.column("coarse")
        self._names = np.unique(coarse)
        clients_each, remainder = divmod(self.num_partitions, len(self._names))
        if remainder or not clients_each:
            raise ValueError(
                f"num-clients is {self.num_partitions}; it must be a multiple of the "
                f"{len(self._names)} superclasses"
            )
        rows_of = []
        for name in self._names:
            rows = np.flatnonzero(coarse == name)
            by_class = rows[np.argsort(labels[rows], kind="stable")]
            for j in range(clients_each):
                rows_of.append(by_class[j::clients_each])
        return rows_of

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The client's superclass."""
        clients_each = self.num_partitions // len(self._names)
        return {"coarse": str(self._names[client // clients_each])}
