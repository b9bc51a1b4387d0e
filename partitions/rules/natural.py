"""Natural clients: one for each value of a column.

Writers of FEMNIST (FedTTA draws 185 of 3 550), alphabets of Omniglot, authors of Landmarks,
geographic cells of iNaturalist."""

import numpy as np

from partitions.rules.partitioner import RowsPartitioner


class NaturalPartitioner(RowsPartitioner):
    """One random value of `column` for each client, among values with at least `min_samples` rows.

    Rows with an empty value belong to no client.

    Raises ValueError if there are fewer values than clients, or no such column."""

    def __init__(self, num_partitions: int, column: str, min_samples: int, seed: int) -> None:
        super().__init__(num_partitions)
        if min_samples < 1:
            raise ValueError(f"partition.min-samples is {min_samples}; it must be at least 1")
        self._column = column
        self._min_samples = min_samples
        self._seed = seed

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """All rows of the client's value."""
        values, inverse, counts = np.unique(
            self.column(self._column), return_inverse=True, return_counts=True
        )
        eligible = np.flatnonzero((counts >= self._min_samples) & (values.astype(str) != ""))
        if len(eligible) < self.num_partitions:
            raise ValueError(
                f"num-clients is {self.num_partitions}, but only {len(eligible)} values of "
                f"{self._column!r} have at least {self._min_samples} samples"
            )
        generator = np.random.default_rng(self._seed)
        chosen = np.sort(generator.choice(eligible, self.num_partitions, replace=False))
        self._names = [str(values[value]) for value in chosen]
        rows_by_value = np.argsort(inverse, kind="stable")
        bounds = np.concatenate([[0], np.cumsum(counts)])
        return [rows_by_value[bounds[value] : bounds[value + 1]] for value in chosen]

    def attributes(self, client: int) -> dict[str, float | int | str]:
        """The client's value of the column."""
        return {self._column: self._names[client]}
