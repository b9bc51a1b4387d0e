"""Preference partition (FedEmbed, section 4): users label by preference, so labels conflict.

User u of sub-population s(u) labels a sample positive iff its type, the dataset's class, is s(u).
A user holds few samples; in each of its parts (training, validation, test) half of them are
positive. A user's rows are drawn by seed when its data are first used. Two users may hold the same
row, but a training row of one user is never a validation or test row of another: each part has its
own pool of rows (ours)."""

from collections.abc import Sequence

import numpy as np

from fedapps.common.seeds import seed_of
from partitions.rules.partitioner import RowsPartitioner


class PreferencePartitioner(RowsPartitioner):
    """`samples` rows for each user, `test` of them for testing and `validation` for validation.

    `preferred` (num_users,) holds s(u), the users' sub-populations. A partition lists its training
    rows first and its test rows last. Raises ValueError if a part cannot be halved or a pool is too
    small."""

    def __init__(
        self, preferred: Sequence[int], samples: int, validation: int, test: int, seed: int
    ) -> None:
        super().__init__(len(preferred))
        self.parts = {"train": samples - validation - test}
        if validation:
            self.parts["validation"] = validation
        self.parts["test"] = test
        for part, count in self.parts.items():
            if count < 2 or count % 2:
                raise ValueError(
                    f"partition.samples-per-user is {samples}, partition.validation-per-user "
                    f"{validation} and partition.test-per-user {test}: {count} samples to {part}; "
                    f"it must be even and at least 2"
                )
        self.preferred = preferred
        self._seed = seed
        self._pools: dict[str, list[np.ndarray]] = {}

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """The rows of every user."""
        return [self.rows(user) for user in range(self.num_partitions)]

    def rows(self, user: int) -> np.ndarray:
        """Row numbers (samples,) of one user, part by part."""
        if not self._pools:
            self._pools = self._split_into_pools()
        preferred = self.preferred[user]
        generator = np.random.default_rng(seed_of(self._seed, "user", user))
        rows_of_parts = []
        for part, count in self.parts.items():
            pools = self._pools[part]
            other_pools = [*pools[:preferred], *pools[preferred + 1 :]]
            positive = generator.choice(pools[preferred], count // 2, replace=False)
            negative = generator.choice(np.concatenate(other_pools), count // 2, replace=False)
            rows = np.concatenate([positive, negative])
            rows_of_parts.append(generator.permutation(rows))
        return np.concatenate(rows_of_parts)

    def _split_into_pools(self) -> dict[str, list[np.ndarray]]:
        """For each part, the rows of each type from which users draw. Pools have sizes in
        proportion to the parts."""
        types = self.column("label")
        num_types = 1 + int(max(types.max(), *self.preferred))
        generator = np.random.default_rng(self._seed)
        ends = np.cumsum(list(self.parts.values())) / sum(self.parts.values())
        pools: dict[str, list[np.ndarray]] = {part: [] for part in self.parts}
        for kind in range(num_types):
            rows = generator.permutation(np.flatnonzero(types == kind))
            cuts = [round(end * len(rows)) for end in ends[:-1]]
            for (part, count), pool in zip(self.parts.items(), np.split(rows, cuts), strict=True):
                if kind in self.preferred and len(pool) < count // 2:
                    raise ValueError(
                        f"type {kind} has {len(pool)} rows to {part}, fewer than the "
                        f"{count // 2} positive ones of a user"
                    )
                pools[part].append(np.sort(pool))
        return pools


def apportion(text: str, users: int, types: int) -> np.ndarray:
    """Users of each type (types,), by the largest-remainder method from comma-separated shares that
    sum to 1. An empty text means equal shares.

    Raises ValueError if there is not one share per type, or if they do not sum to 1."""
    words = [word for word in text.split(",") if word.strip()]
    try:
        shares = np.array([float(word) for word in words])
    except ValueError as error:
        raise ValueError(f"partition.shares is {text!r}; it must list numbers") from error
    if not words:
        shares = np.full(types, 1 / types)
    if len(shares) != types or shares.min() < 0 or not np.isclose(shares.sum(), 1.0):
        raise ValueError(
            f"partition.shares is {text!r}; it must list {types} shares >= 0 that sum to 1"
        )
    counts = np.floor(shares * users + 1e-9).astype(int)  # 0.7 · 10 is a little less than 7
    largest_remainder_first = np.argsort(counts - shares * users, kind="stable")
    counts[largest_remainder_first[: users - counts.sum()]] += 1
    return counts
