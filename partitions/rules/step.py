"""Step partition (ATP, Bao et al., NeurIPS 2023, their `step_2_16`): few major classes a client.

A client's tuple of major classes gives class c the weight 1 + (ratio − 1)·(occurrences of c). Of
200 samples, majors a ≠ b and ratio 16 give 80, 80 and 5 of each other class; a = b gives 155 and 5.
Departs from the authors' code: all clients have the same size, and any number of clients and
classes works. Every class is a major class equally often, as far as the numbers divide."""

import itertools

import numpy as np

from partitions.rules.partitioner import RowsPartitioner


class StepPartitioner(RowsPartitioner):
    """`samples_per_client` rows for each client; 0: the most for which no row is used twice.

    Raises ValueError if the data do not have enough rows of a class."""

    def __init__(
        self,
        num_partitions: int,
        major_classes: int,
        ratio: float,
        samples_per_client: int,
        seed: int,
    ) -> None:
        super().__init__(num_partitions)
        self._major_classes = major_classes
        self._ratio = ratio
        self._samples = samples_per_client
        self._seed = seed

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """For each client the next rows of each class; `counts` gives their number."""
        classes, available = np.unique(labels, return_counts=True)
        weights = self.weights(len(classes))
        largest = len(labels) // self._num
        while largest and (counts(weights, largest) > available).any():
            largest -= 1
        if self._samples > largest:
            raise ValueError(
                f"partition.samples-per-client is {self._samples}; for num-clients={self._num} the "
                f"data give at most {largest}"
            )
        size = self._samples or largest
        ends = counts(weights, size, each=True).cumsum(0)
        pieces_of: list[list[np.ndarray]] = [[] for _ in range(self._num)]
        for label, class_ends in zip(classes, ends.T, strict=True):
            rows = np.flatnonzero(labels == label)  # in random order, as all rows are
            for pieces, client_rows in zip(pieces_of, np.split(rows, class_ends), strict=False):
                pieces.append(client_rows)  # the rows after the last client's are unused
        return [np.concatenate(pieces) for pieces in pieces_of]

    def weights(self, num_classes: int) -> np.ndarray:
        """Weights (num_clients, num_classes); a row sums to num_classes + major·(ratio − 1)."""
        generator = np.random.default_rng(self._seed)
        # A tuple of majors is (a, a + s₂, a + s₃, …) modulo the number of classes. All tuples
        # with equal steps s form a block: in it every class is first, second, … exactly once.
        all_steps = list(itertools.product(range(num_classes), repeat=self._major_classes - 1))
        major_tuples: list[list[int]] = []
        for number in generator.permutation(len(all_steps)):
            steps = np.array((0, *all_steps[number]))
            for first in generator.permutation(num_classes):
                major_tuples.append(((first + steps) % num_classes).tolist())
            if len(major_tuples) >= self._num:
                break
        weights = np.ones((self._num, num_classes))
        for client, place in enumerate(generator.permutation(self._num)):
            majors = major_tuples[place % len(major_tuples)]
            np.add.at(weights[client], majors, self._ratio - 1)  # a class may occur twice
        return weights


def counts(weights: np.ndarray, size: int, *, each: bool = False) -> np.ndarray:
    """The number of a client's samples of each class, in proportion to its `weights` (n, C) and
    rounded to a sum of `size`. (n, C) if `each`, else summed over the clients (C,).

    Client i rounds the classes in the order i, i + 1, …, so that no class gains from rounding."""
    num_clients, num_classes = weights.shape
    order = (np.arange(num_classes) + np.arange(num_clients)[:, None]) % num_classes
    cumulated = np.take_along_axis(weights, order, 1).cumsum(1)
    ends = np.round(size * cumulated / cumulated[:, -1:]).astype(int)
    samples = np.empty((num_clients, num_classes), int)
    np.put_along_axis(samples, order, np.diff(ends, prepend=0), 1)
    return samples if each else samples.sum(0)
