"""Step partition (ATP, Bao et al., NeurIPS 2023, their `step_2_16`): few major classes a client.

A client's tuple of major classes gives class c the weight 1 + (ratio − 1)·(occurrences of c). Of
200 samples, majors a ≠ b and ratio 16 give 80, 80 and 5 of each other class; a = b gives 155 and 5.
Departs from the authors' code: clients have one size, and any number of clients and classes works.
Tuples are dealt so that each class is a major one equally often, as far as the counts divide."""

import itertools

import numpy as np

from partitions.rules.partitioner import RowsPartitioner


class StepPartitioner(RowsPartitioner):
    """`samples_per_client` rows, 0: the most for which no row is needed twice.

    Raises ValueError if the data cannot give every client that many rows."""

    def __init__(
        self,
        num_partitions: int,
        major_classes: int,
        ratio: float,
        samples_per_client: int,
        seed: int,
    ) -> None:
        super().__init__(num_partitions)
        self._major, self._ratio, self._seed = major_classes, ratio, seed
        self._samples = samples_per_client

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """The next rows of each class, as many as `counts` says."""
        classes, present = np.unique(labels, return_counts=True)
        weights = self.weights(len(classes))
        most = len(labels) // self._num
        sizes = (size for size in range(most, 0, -1) if (counts(weights, size) <= present).all())
        size = next(sizes, 0)
        if self._samples > size:
            raise ValueError(
                f"partition.samples-per-client is {self._samples}; for num-clients={self._num} the "
                f"data give at most {size}"
            )
        ends = counts(weights, self._samples or size, each=True).cumsum(0)
        pools = [np.flatnonzero(labels == label) for label in classes]  # in random order
        parts = [np.split(pool, column)[:-1] for pool, column in zip(pools, ends.T, strict=True)]
        return [np.concatenate(rows) for rows in zip(*parts, strict=True)]

    def weights(self, num_classes: int) -> np.ndarray:
        """Weights (num_clients, num_classes); a row sums to num_classes + major·(ratio − 1)."""
        generator = np.random.default_rng(self._seed)
        steps = list(itertools.product(range(num_classes), repeat=self._major - 1))
        blocks: list[tuple[int, ...]] = []  # in a block every class is first, second, … once
        for number in generator.permutation(len(steps)):
            for first in generator.permutation(num_classes):
                blocks.append((first, *((first + step) % num_classes for step in steps[number])))
            if len(blocks) >= self._num:
                break
        dealt = list(itertools.islice(itertools.cycle(blocks), self._num))
        weights = np.ones((self._num, num_classes))
        for client, place in enumerate(generator.permutation(self._num)):
            np.add.at(weights[client], list(dealt[place]), self._ratio - 1)
        return weights


def counts(weights: np.ndarray, size: int, *, each: bool = False) -> np.ndarray:
    """How many of `size` samples a client has of each class, by its weights (n, C), rounded so that
    they sum to `size`; (n, C) if `each`, else summed over the clients (C,).

    Client i rounds from class i on, so that no class gains from rounding."""
    n, num_classes = weights.shape
    turned = (np.arange(num_classes) + np.arange(n)[:, None]) % num_classes
    shares = np.take_along_axis(weights, turned, 1).cumsum(1)
    ends = np.round(size * shares / shares[:, -1:]).astype(int)
    result = np.empty((n, num_classes), int)
    np.put_along_axis(result, turned, np.diff(ends, prepend=0), 1)
    return result if each else result.sum(0)
