"""A dataset dealt to clients: roles, and each client's share, cut once and kept."""

from functools import cache

import numpy as np
import torch

from partitions.datasets import Dataset, Info, info, load
from partitions.registry import Config, partition
from partitions.seeds import seed_of
from partitions.shares import Samples, Share

KEYS = ("dataset", "data-dir", "partition", "num-clients", "train-fraction", "standardize", "seed")


class Federation:
    """`num_clients` clients of one dataset, `novel` (num_clients,) of them without a part in
    training, by seed.

    Training clients keep ``partition.validation-fraction`` of their samples for validation.
    Raises ValueError for settings that cannot be met."""

    def __init__(self, config: Config) -> None:
        self.num_clients = int(config["num-clients"])
        self._seed = int(config["seed"])
        fraction = float(config["partition.validation-fraction"])
        if not 0 <= fraction < 1:
            raise ValueError(f"partition.validation-fraction is {fraction}; it must lie in [0, 1)")
        self._validation = fraction
        self.novel = self._roles(float(config["train-fraction"]))
        rule = partition(str(config["partition"])).make(config, self.novel)
        self.dataset: Dataset = load(str(config["dataset"]), str(config["data-dir"]))
        self.info: Info = self.dataset.info
        if self.num_clients > len(self.dataset.y):
            raise ValueError(
                f"num-clients is {self.num_clients}, more than the {len(self.dataset.y)} samples "
                f"of {self.info.name}"
            )
        self._rows = self._deal(rule)
        if empty := [i for i, rows in enumerate(self._rows) if len(rows) < 2]:
            raise ValueError(
                f"clients {empty} got fewer than 2 samples; use fewer clients than num-clients="
                f"{self.num_clients} or a milder partition than {config['partition']!r}"
            )
        self._mean, self._std = self._moments() if config["standardize"] else (0.0, 1.0)
        self._shares: dict[int, Share] = {}

    def share(self, client: int) -> Share:
        """The client's data. Raises ValueError for an id out of range."""
        if not 0 <= client < self.num_clients:
            raise ValueError(f"client {client} is not one of the {self.num_clients} clients")
        if client not in self._shares:
            self._shares[client] = self._cut(client)
        return self._shares[client]

    def _roles(self, fraction: float) -> np.ndarray:
        count = round(fraction * self.num_clients)
        if not 0 < fraction <= 1 or not count:
            raise ValueError(
                f"train-fraction is {fraction}; of {self.num_clients} clients it must leave at "
                f"least one for training and be at most 1"
            )
        generator = np.random.default_rng(seed_of(self._seed, "roles"))
        novel = np.ones(self.num_clients, dtype=bool)
        novel[generator.permutation(self.num_clients)[:count]] = False
        return novel

    def _deal(self, rule) -> list[np.ndarray]:
        """Each client's rows by the partitioner, which sees labels and row numbers only."""
        import datasets

        generator = np.random.default_rng(seed_of(self._seed, "rows"))
        rows = generator.permutation(len(self.dataset.y))
        labels = self.dataset.y.numpy()[rows]
        rule.dataset = datasets.Dataset.from_dict({"label": labels, "row": rows})
        parts = (rule.load_partition(i) for i in range(self.num_clients))
        return [np.asarray(part["row"], dtype=np.int64) for part in parts]

    def _moments(self) -> tuple[float, float]:
        """Mean and deviation of the training clients' inputs, over all pixels."""
        rows = np.concatenate([self._rows[i] for i in np.flatnonzero(~self.novel)])
        x = self.dataset.x[torch.from_numpy(np.sort(rows))].double() / self.info.scale
        return float(x.mean()), float(x.std())

    def _cut(self, client: int) -> Share:
        generator = np.random.default_rng(seed_of(self._seed, "split", client))
        rows = torch.from_numpy(generator.permutation(self._rows[client]))
        held_out = max(1, round(self._validation * len(rows))) if self._validation else 0
        index = {
            "train": rows[held_out:],
            "validation": rows[:held_out],
            "everything": rows,
        }
        samples = {name: self._samples(part) for name, part in index.items()}
        return Share(
            samples["train"],
            samples["validation"],
            None,
            samples["everything"],
            bool(self.novel[client]),
            {"classes": len(self.dataset.y[rows].unique())},
        )

    def _samples(self, index: torch.Tensor) -> Samples:
        data = self.dataset
        return Samples(data.x, data.y, index, data.info.scale, self._mean, self._std)


def federation(config: Config) -> Federation:
    """The federation that `config` describes, one object per process for equal settings."""
    relevant = {k: v for k, v in config.items() if k in KEYS or k.startswith("partition.")}
    items = tuple(sorted(relevant.items()))
    if config["partition"] == "preference":
        return _users(items)
    return _federation(items)


def task(config: Config) -> Info:
    """What the network is to do: the dataset's task, or the one that the partition makes of it."""
    known = info(str(config["dataset"]))
    if config["partition"] == "preference":
        from partitions.users import preference_info

        return preference_info(known)
    return known


@cache
def _federation(items: tuple[tuple[str, str | int | float | bool], ...]) -> Federation:
    return Federation(dict(items))


@cache
def _users(items: tuple[tuple[str, str | int | float | bool], ...]) -> Federation:
    from partitions.users import PreferenceFederation

    return PreferenceFederation(dict(items))
