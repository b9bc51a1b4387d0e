"""Preference partition (FedEmbed, section 4): users label by preference, so labels conflict.

User u of sub-population s(u) labels a sample positive iff its type, the dataset's class, is s(u).
A user holds few samples, half of them positive in its training, validation and test part. Rows are
drawn by seed when a user is requested. Two users may hold the same row, but a training row of one
is never a validation or test row of another: each part has its own pool of rows (ours)."""

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
        counts = {"train": samples - validation - test, "validation": validation, "test": test}
        self.parts = {part: n for part, n in counts.items() if n or part != "validation"}
        for part, count in self.parts.items():
            if count < 2 or count % 2:
                raise ValueError(
                    f"partition.samples-per-user is {samples}, partition.validation-per-user "
                    f"{validation} and partition.test-per-user {test}: {count} samples to {part}; "
                    f"it must be even and at least 2"
                )
        self.preferred, self._seed = preferred, seed
        self._pools: dict[str, list[np.ndarray]] = {}

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """The rows of every user."""
        return [self.rows(user) for user in range(self.num_partitions)]

    def rows(self, user: int) -> np.ndarray:
        """Row numbers (samples,) of one user, part by part."""
        generator = np.random.default_rng(seed_of(self._seed, "user", user))
        chosen = []
        for part, count in self.parts.items():
            pools, kind = self._pool(part), self.preferred[user]
            positive = generator.choice(pools[kind], count // 2, replace=False)
            others = np.concatenate([pool for t, pool in enumerate(pools) if t != kind])
            negative = generator.choice(others, count // 2, replace=False)
            chosen += [generator.permutation(np.concatenate([positive, negative]))]
        return np.concatenate(chosen)

    def _pool(self, part: str) -> list[np.ndarray]:
        """The rows of each type that users have in this part: pools of a proportional size."""
        if not self._pools:
            types = self.column("label")
            generator = np.random.default_rng(self._seed)
            ends = np.cumsum(list(self.parts.values())) / sum(self.parts.values())
            self._pools = {name: [] for name in self.parts}
            for kind in range(1 + int(max(types.max(), *self.preferred))):
                rows = generator.permutation(np.flatnonzero(types == kind))
                cuts = [round(end * len(rows)) for end in ends[:-1]]
                for name, pool in zip(self.parts, np.split(rows, cuts), strict=True):
                    if kind in self.preferred and len(pool) < self.parts[name] // 2:
                        raise ValueError(
                            f"type {kind} has {len(pool)} rows to {name}, fewer than the "
                            f"{self.parts[name] // 2} positive ones of a user"
                        )
                    self._pools[name].append(np.sort(pool))
        return self._pools[part]


def apportion(text: str, users: int, types: int) -> np.ndarray:
    """Users per type (types,) by comma-separated shares that sum to 1, largest remainders first.

    Raises ValueError if there is not one share per type, or if they do not sum to 1."""
    words = [word for word in text.split(",") if word.strip()]
    try:
        shares = np.array([float(word) for word in words]) if words else np.full(types, 1 / types)
    except ValueError as error:
        raise ValueError(f"partition.shares is {text!r}; it must list numbers") from error
    if len(shares) != types or shares.min() < 0 or not np.isclose(shares.sum(), 1.0):
        raise ValueError(
            f"partition.shares is {text!r}; it must list {types} shares >= 0 that sum to 1"
        )
    counts = np.floor(shares * users + 1e-9).astype(int)
    order = np.argsort(counts - shares * users, kind="stable")
    counts[order[: users - counts.sum()]] += 1
    return counts
