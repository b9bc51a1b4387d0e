"""The federation of users who prefer one of a dataset's types each."""

import numpy as np
import torch
from torch import Tensor

from fedapps.common.tasks import CLASSES, Targets
from partitions.datasets.description import TABLE, scaling
from partitions.datasets.loading import Dataset, Info, configured, preference_info
from partitions.federations import Federation, check_classes, novel_shots
from partitions.rules.registry import PARTITIONS, Config, changes
from partitions.shares import SUB_POPULATION, PreferredSamples, Share

RANK = "rank"  # attribute of a share: position in its sub-population, from 0, novel users last


class PreferenceFederation(Federation):
    """Users who prefer one of a dataset's types each; a share's attributes name its sub-population.

    `partition.shares` lists each sub-population's fraction of the users, in the order of the types.
    Empty: equal fractions."""

    def __init__(self, config: Config) -> None:
        import datasets

        shots = novel_shots(config)
        if shots:
            raise ValueError(
                f"novel-shots is {shots}; users with preferences show no labels: use 0"
            )
        labeled = float(config["partition.labeled-clients"])
        if labeled < 1:
            raise ValueError(
                f"partition.labeled-clients is {labeled:g}; users with preferences all have "
                "labels, so leave it at 1"
            )
        self.num_clients = int(config["num-clients"])
        self._seed = int(config["seed"])
        self.novel = self._roles(float(config["train-fraction"]))
        self.unlabeled = np.zeros_like(self.novel)  # each user's labels are its preferences
        if changes(config, self.novel) or config["partition.test-shift"] != "none":
            raise ValueError(
                "partition 'preference' takes neither corruptions, permuted labels nor test-shift"
            )
        self.rule = PARTITIONS["preference"].make(config, self.novel)
        self.dataset: Dataset = configured(config)
        check_classes("preference", self.dataset.info)
        if self.dataset.info.inputs is not None and self.dataset.info.inputs.kind == TABLE:
            raise ValueError(
                f"partition 'preference' takes images and vectors, but {self.dataset.info.name} is "
                "a table; choose another partition"
            )
        if self.dataset.words:
            raise ValueError(
                f"partition 'preference' takes images and vectors, but {self.dataset.info.name} "
                "holds texts; choose another partition"
            )
        self.info: Info = preference_info(self.dataset.info)
        types = self.dataset.y[: self.dataset.num_train].numpy()
        self.rule.dataset = datasets.Dataset.from_dict({"label": types})
        self.preferred = np.asarray(self.rule.preferred)
        self._rank = np.zeros(self.num_clients, dtype=int)
        for kind in np.unique(self.preferred):
            users = np.flatnonzero(self.preferred == kind)
            training_first = users[np.argsort(self.novel[users], kind="stable")]
            self._rank[training_first] = np.arange(len(users))
        self._drawn: dict[int, Tensor] = {}  # rows by user
        self.encoding = None
        self.words = ()
        self.targets = Targets(CLASSES)
        self._mean, self._std = self._scaling(scaling(config, self.dataset.info.inputs))

    def share(self, client: int) -> Share:
        """The user's data. Raises ValueError for an id out of range."""
        self.check_client(client)
        if client not in self._drawn:
            self._drawn[client] = torch.from_numpy(self.rule.rows(client))
        rows = self._drawn[client]
        sizes = self.rule.parts
        train, validation, test = rows.split(
            [sizes["train"], sizes.get("validation", 0), sizes["test"]]
        )
        attributes: dict[str, float | int | str] = {
            SUB_POPULATION: int(self.preferred[client]),
            RANK: int(self._rank[client]),
        }
        return Share(
            self._preferred_samples(client, train),
            self._preferred_samples(client, validation),
            self._preferred_samples(client, test),
            self._preferred_samples(client, rows),
            bool(self.novel[client]),
            attributes,
        )

    def _preferred_samples(self, client: int, index: Tensor) -> PreferredSamples:
        return PreferredSamples(
            self.dataset.x,
            self.dataset.y,
            index,
            self.dataset.info.scale,
            self._mean,
            self._std,
            int(self.preferred[client]),
        )

    def _moment_rows(self) -> Tensor:
        """The rows of the training split."""
        return torch.arange(self.dataset.num_train)
