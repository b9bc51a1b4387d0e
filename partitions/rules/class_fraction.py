"""Class-fraction partition (pFedHN, section 5.1, after Dinh et al., 2020).

Each client holds K classes; for each of them a_ic ~ U(0.4, 0.6), and it gets the share
a_ic / Σ_j a_jc of the class's samples: the same classes and shares of the training, validation
and test rows. As in the authors' code classes are drawn among those with the fewest holders: all
are held equally often, and none is lost if N·K ≥ C."""

import numpy as np

from partitions.rules.partitioner import RowsPartitioner, assign_by_shares

LOW, HIGH = 0.4, 0.6


class ClassFractionPartitioner(RowsPartitioner):
    """`classes_per_client` classes a client. ValueError if the data has fewer."""

    pooled = True

    def __init__(self, num_partitions: int, classes_per_client: int, seed: int) -> None:
        super().__init__(num_partitions)
        if classes_per_client < 1:
            raise ValueError(
                f"partition.classes-per-client is {classes_per_client}; it must be at least 1"
            )
        self._k, self._seed = classes_per_client, seed

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows by the shares a_ic / Σ_j a_jc."""
        generator = np.random.default_rng(self._seed)
        num_classes = len(np.unique(labels))
        if self._k > num_classes:
            raise ValueError(
                f"partition.classes-per-client is {self._k}, more than the {num_classes} classes"
            )
        held = np.zeros((self.num_partitions, num_classes), dtype=bool)
        for client in held:
            order = generator.permutation(num_classes)
            client[order[np.argsort(held.sum(0)[order], kind="stable")[: self._k]]] = True
        a = np.where(held, generator.uniform(LOW, HIGH, held.shape), 0.0)
        return assign_by_shares(labels, self.column("part"), a / np.maximum(a.sum(0), 1e-12))
