"""Pathological partition (McMahan et al., 2017; FedTTA, section 4.1): few classes a client.

Each client holds at most `classes_per_client` classes; all clients hold equally many samples."""

import numpy as np

from partitions.partitioner import RowsPartitioner


class PathologicalPartitioner(RowsPartitioner):
    """Cuts every class into shards of one size and deals `classes_per_client` to each client.

    The size s is the largest for which Σ_c ⌊n_c / s⌋ shards suffice, so no shard mixes classes;
    the Σ_c (n_c mod s) samples that remain, and shards too many, belong to nobody."""

    def __init__(self, num_partitions: int, classes_per_client: int, seed: int) -> None:
        super().__init__(num_partitions)
        if classes_per_client < 1:
            raise ValueError(
                f"partition.classes-per-client is {classes_per_client}; it must be at least 1"
            )
        self._shards, self._seed = classes_per_client, seed

    def deal(self, labels: np.ndarray) -> list[np.ndarray]:
        """`classes_per_client` random shards a client."""
        needed = self._num * self._shards
        _, counts = np.unique(labels, return_counts=True)
        size = len(labels) // needed
        while size and (counts // size).sum() < needed:
            size -= 1
        if not size:
            raise ValueError(
                f"{len(labels)} samples are too few for num-clients={self._num} with "
                f"classes-per-client={self._shards}: {needed} shards of one class each"
            )
        generator = np.random.default_rng(self._seed)
        shards = []
        for label in np.unique(labels):
            rows = generator.permutation(np.flatnonzero(labels == label))
            shards += [rows[i * size : (i + 1) * size] for i in range(len(rows) // size)]
        order = generator.permutation(len(shards))[:needed].reshape(self._num, self._shards)
        return [np.concatenate([shards[i] for i in mine]) for mine in order]
