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
        self._shards, self._seed, self._equal_sizes = classes_per_client, seed, equal_sizes

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """`classes_per_client` random shards a client."""
        needed = self._num * self._shards
        generator = np.random.default_rng(self._seed)
        cut = self._equal if self._equal_sizes else self._whole
        shards = cut(labels, needed, generator)
        order = generator.permutation(len(shards))[:needed].reshape(self._num, self._shards)
        return [np.concatenate([shards[i] for i in chosen]) for chosen in order]

    def _equal(
        self, labels: np.ndarray, needed: int, generator: np.random.Generator
    ) -> list[np.ndarray]:
        """Shards of one size, at least `needed`."""
        _, counts = np.unique(labels, return_counts=True)
        size = len(labels) // needed
        while size and (counts // size).sum() < needed:
            size -= 1
        if not size:
            raise ValueError(
                f"{len(labels)} samples are too few for num-clients={self._num} with "
                f"classes-per-client={self._shards}: {needed} shards of one class each"
            )
        shards = []
        for label in np.unique(labels):
            rows = generator.permutation(np.flatnonzero(labels == label))
            shards += [rows[i * size : (i + 1) * size] for i in range(len(rows) // size)]
        return shards

    def _whole(
        self, labels: np.ndarray, needed: int, generator: np.random.Generator
    ) -> list[np.ndarray]:
        """Equally many shards of every class, the first ones with a sample more."""
        classes = np.unique(labels)
        if needed % len(classes):
            raise ValueError(
                f"num-clients={self._num} with classes-per-client={self._shards} makes {needed} "
                f"shards, which {len(classes)} classes do not divide; set partition.equal-sizes"
            )
        return [
            shard
            for label in classes
            for shard in np.array_split(
                generator.permutation(np.flatnonzero(labels == label)), needed // len(classes)
            )
        ]
