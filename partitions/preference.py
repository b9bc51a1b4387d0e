"""Preference partition (FedEmbed, section 4): users who label by taste, so that labels conflict.

User u of sub-population s(u) labels a sample positive iff its type, the dataset's class, is s(u).
A user holds few samples, half of them positive in its training and in its test part. Rows are
drawn, by seed, when a user is asked for; nothing is held per user but its sub-population. Two
users may hold the same row, but what one trains on is never another's test sample: the types'
rows are first cut into a pool to train on and a pool to test on (ours)."""

from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from partitions.seeds import seed_of


class PreferencePartitioner(Partitioner):
    """Deals `samples` rows to each user, `test` of them for testing, halves of them positive.

    `preferred` (num_users,) holds s(u), the users' sub-populations. A partition lists its training
    rows first. Raises ValueError where a part cannot be halved or a pool is too small."""

    def __init__(self, preferred: Sequence[int], samples: int, test: int, seed: int) -> None:
        super().__init__()
        self.parts = {"train": samples - test, "test": test}
        for part, count in self.parts.items():
            if count < 2 or count % 2:
                raise ValueError(
                    f"partition.samples-per-user is {samples} and partition.test-per-user {test}: "
                    f"{count} samples to {part}; it must be even and at least 2"
                )
        self.preferred, self._seed = preferred, seed
        self._pools: dict[str, list[np.ndarray]] = {}

    @property
    def num_partitions(self) -> int:
        """Number of users."""
        return len(self.preferred)

    def load_partition(self, partition_id: int) -> Dataset:
        """The samples of one user."""
        return self.dataset.select(self.rows(partition_id))

    def rows(self, user: int) -> np.ndarray:
        """Row numbers (samples,) of one user: its training part, then its test part."""
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
        """The rows of each type that users train on, or test on: pools of a proportional size."""
        if not self._pools:
            types = np.asarray(self.dataset["label"])
            generator = np.random.default_rng(self._seed)
            share = self.parts["train"] / sum(self.parts.values())
            self._pools = {"train": [], "test": []}
            for kind in range(1 + int(max(types.max(), *self.preferred))):
                rows = generator.permutation(np.flatnonzero(types == kind))
                cut = round(share * len(rows))
                for name, pool in (("train", rows[:cut]), ("test", rows[cut:])):
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
