"""Pathological partition (McMahan et al., 2017; FedTTA, section 4.1): few classes a client.

Each client holds at most `classes_per_client` classes, cut into shards of one size. In the code of
FedTTA's authors every class makes equally many shards and no sample is left over."""

import numpy as np

from partitions.rules.partitioner import RowsPartitioner


class PathologicalPartitioner(RowsPartitioner):
    """Cuts every class into shards; each client gets `classes_per_client`, maybe two of one class.

    With `equal_sizes` all shards have the largest size s for which Σ_c ⌊n_c / s⌋ of them suffice,
    so no shard mixes classes; remaining samples and shards belong to no client. Otherwise every
    class makes equally many shards, whose sizes differ by at most one in a class."""

    def __init__(
        self, num_partitions: int, classes_per_client: int, seed: int, equal_sizes: bool = True
    ) -> None:
        super().__init__(num_partitions)
        if classes_per_client < 1:
            raise ValueError(
                f"partition.classes-per-client is {classes_per_client}; it must be at least 1"
            )
        self._shards_per_client = classes_per_client
        self._seed = seed
        self._equal_sizes = equal_sizes

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """`classes_per_client` random shards a client."""
        needed = self._num * self._shards_per_client
        generator = np.random.default_rng(self._seed)
        if self._equal_sizes:
            shards = self._shards_of_one_size(labels, needed, generator)
        else:
            shards = self._shards_of_all_samples(labels, needed, generator)
        order = generator.permutation(len(shards))[:needed]
        rows_of = []
        for shards_of_client in order.reshape(self._num, self._shards_per_client):
            rows_of.append(np.concatenate([shards[shard] for shard in shards_of_client]))
        return rows_of

    def _shards_of_one_size(
        self, labels: np.ndarray, needed: int, generator: np.random.Generator
    ) -> list[np.ndarray]:
        """At least `needed` shards of the largest size for which there are enough."""
        _, counts = np.unique(labels, return_counts=True)
        size = len(labels) // needed
        while size and (counts // size).sum() < needed:
            size -= 1
        if not size:
            raise ValueError(
                f"{len(labels)} samples are too few for num-clients={self._num} with "
                f"classes-per-client={self._shards_per_client}: {needed} shards of one class each"
            )
        shards = []
        for label in np.unique(labels):
            rows = generator.permutation(np.flatnonzero(labels == label))
            for start in range(0, len(rows) - size + 1, size):
                shards.append(rows[start : start + size])
        return shards

    def _shards_of_all_samples(
        self, labels: np.ndarray, needed: int, generator: np.random.Generator
    ) -> list[np.ndarray]:
        """`needed` shards, equally many of every class; the first of a class may have one sample
        more than the others."""
        classes = np.unique(labels)
        if needed % len(classes):
            raise ValueError(
                f"num-clients={self._num} with classes-per-client={self._shards_per_client} makes "
                f"{needed} shards, which {len(classes)} classes do not divide; set "
                "partition.equal-sizes"
            )
        shards = []
        for label in classes:
            rows = generator.permutation(np.flatnonzero(labels == label))
            shards.extend(np.array_split(rows, needed // len(classes)))
        return shards
