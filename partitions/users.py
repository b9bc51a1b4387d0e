"""Users with preferences: shares of a dataset under the preference partition."""

import numpy as np
import torch
from torch import Tensor

from partitions.base import Federation, novel_shots
from partitions.datasets import Dataset, Info, configured, preference_info
from partitions.registry import PARTITIONS, Config, changes
from partitions.shares import SUB_POPULATION, PreferredSamples, Share

RANK = "rank"  # attribute of a share: position in its sub-population, from 0, novel users last


class PreferenceFederation(Federation):
    """Users of a dataset's types; a share's attributes name its sub-population.

    `partition.shares` gives the sub-populations' shares of the users, comma-separated, in the
    types' order; empty: equal ones."""

    def __init__(self, config: Config) -> None:
        import datasets

        if shots := novel_shots(config):
            raise ValueError(
                f"novel-shots is {shots}; users with preferences show no labels: use 0"
            )
        if (labeled := float(config["partition.labeled-clients"])) < 1:
            raise ValueError(
                f"partition.labeled-clients is {labeled:g}; users with preferences all have "
                "labels, so leave it at 1"
            )
        self.num_clients, self._seed = int(config["num-clients"]), int(config["seed"])
        self.novel = self._roles(float(config["train-fraction"]))
        if changes(config, self.novel) or config["partition.test-shift"] != "none":
            raise ValueError(
                "partition 'preference' takes neither corruptions, permuted labels nor test-shift"
            )
        self.rule = PARTITIONS["preference"].make(config, self.novel)
        self.dataset: Dataset = configured(config)
        self.info: Info = preference_info(self.dataset.info)
        types = self.dataset.y[: self.dataset.num_train].numpy()
        self.rule.dataset = datasets.Dataset.from_dict({"label": types})
        self.preferred = np.asarray(self.rule.preferred)
        self._rank = np.zeros(self.num_clients, dtype=int)
        for kind in np.unique(self.preferred):
            users = np.flatnonzero(self.preferred == kind)
            users = users[np.argsort(self.novel[users], kind="stable")]
            self._rank[users] = np.arange(len(users))
        self._drawn: dict[int, Tensor] = {}
        self._mean, self._std = self._scaling(str(config["standardize"]))

    def share(self, client: int) -> Share:
        """The user's data. Raises ValueError for an id out of range."""
        self.check_client(client)
        if client not in self._drawn:
            self._drawn[client] = torch.from_numpy(self.rule.rows(client))
        rows, parts = self._drawn[client], self.rule.parts
        counts = [parts["train"], parts.get("validation", 0), parts["test"]]
        train, validation, test = rows.split(counts)
        attributes: dict[str, float | int | str] = {
            SUB_POPULATION: int(self.preferred[client]),
            RANK: int(self._rank[client]),
        }
        return Share(
            self._of(client, train),
            self._of(client, validation),
            self._of(client, test),
            self._of(client, rows),
            bool(self.novel[client]),
            attributes,
        )

    def _of(self, client: int, index: Tensor) -> PreferredSamples:
        data, scale = self.dataset, (self.dataset.info.scale, self._mean, self._std)
        return PreferredSamples(data.x, data.y, index, *scale, int(self.preferred[client]))

    def _moment_rows(self) -> Tensor:
        """The training split."""
        return torch.arange(self.dataset.num_train)
