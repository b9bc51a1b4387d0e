"""Class-fraction partition (pFedHN, section 5.1, after Dinh et al., 2020).

Client i holds K classes. For each class c of them it draws a_ic ~ U(0.4, 0.6) and gets the share
a_ic / Σ_j a_jc of the class's samples, with equal shares of training, validation and test rows.
As in the authors' code, a client draws its classes from those that the fewest clients hold. So all
classes are held equally often, and every class is held if N·K ≥ C.

The authors' code divides by a sum over ⌊N·K/C⌋ + 1 clients, though mostly ⌊N·K/C⌋ hold the class.
The share of the missing client is unused: a third of all samples with two holders of each class, a
21st with 20. The paper's sum is over the holders. `extra_holder` chooses the authors' sum."""

import numpy as np

from partitions.rules.partitioner import RowsPartitioner, assign_by_shares

LOW, HIGH = 0.4, 0.6


class ClassFractionPartitioner(RowsPartitioner):
    """`classes_per_client` classes for each client. ValueError if the data has fewer.

    With `extra_holder` shares are those of ⌊N·K/C⌋ + 1 holders, also of a class that has fewer."""

    pooled = True

    def __init__(
        self, num_partitions: int, classes_per_client: int, seed: int, extra_holder: bool = False
    ) -> None:
        super().__init__(num_partitions)
        if classes_per_client < 1:
            raise ValueError(
                f"partition.classes-per-client is {classes_per_client}; it must be at least 1"
            )
        self._k = classes_per_client  # K in the paper
        self._seed = seed
        self._extra_holder = extra_holder

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """Rows by the shares a_ic / Σ_j a_jc."""
        generator = np.random.default_rng(self._seed)
        num_classes = len(np.unique(labels))
        if self._k > num_classes:
            raise ValueError(
                f"partition.classes-per-client is {self._k}, more than the {num_classes} classes"
            )
        held = np.zeros((self.num_partitions, num_classes), dtype=bool)
        for client in range(self.num_partitions):
            # A random order decides among classes with equally many holders.
            order = generator.permutation(num_classes)
            holders = held.sum(0)[order]
            fewest_first = order[np.argsort(holders, kind="stable")]
            held[client, fewest_first[: self._k]] = True
        a = np.where(held, generator.uniform(LOW, HIGH, held.shape), 0.0)
        parts = self.column("part")
        if self._extra_holder:
            with_extra = np.vstack([a, self._of_extra_holders(held, generator)])
            shares = with_extra / with_extra.sum(0)
            return assign_by_shares(labels, parts, shares)[:-1]
        shares = a / np.maximum(a.sum(0), 1e-12)  # a class without holders has shares of 0
        return assign_by_shares(labels, parts, shares)

    def _of_extra_holders(self, held: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """a_jc (C,) of a client j that does not exist, 0 for a class with ⌊N·K/C⌋ + 1 holders."""
        num_clients, num_classes = held.shape
        most = num_clients * self._k // num_classes + 1
        return np.where(held.sum(0) < most, generator.uniform(LOW, HIGH, num_classes), 0.0)
