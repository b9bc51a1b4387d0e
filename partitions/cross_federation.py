"""The federation whose training clients hold one dataset, and its novel clients another."""

from dataclasses import replace

import numpy as np

from fedapps.common.seeds import seed_of
from fedapps.common.tasks import CLASSES, Targets
from partitions.datasets.loading import Info, configured, described
from partitions.federations import Federation, check_classes, novel_shots
from partitions.rules.registry import BASES, Config
from partitions.shares import Share
from partitions.shifts.translation import translated


class CrossFederation(Federation):
    """Training clients hold ``dataset``, novel clients ``partition.novel-dataset``.

    ODPFL-HN, section 6.8: CIFAR-10 to STL-10. The novel dataset's inputs are resized to the size of
    the first one's, its classes are matched by name, and classes without a counterpart are left out
    (see `partitions.shifts.translation`). The base rule partitions both datasets (ours).

    Raises ValueError if they have no common class or different numbers of channels."""

    def __init__(self, config: Config) -> None:
        base_rule = str(config["partition.base-rule"])
        if base_rule not in BASES:
            raise ValueError(f"partition.base-rule is {base_rule!r}; known: {', '.join(BASES)}")
        if config["partition.permuted-labels"] or config["partition.corruption-every"]:
            raise ValueError(
                "partition 'cross-dataset' takes neither permuted-labels nor corruption-every"
            )
        self.num_clients = int(config["num-clients"])
        self._seed = int(config["seed"])
        self.novel = self._roles(float(config["train-fraction"]))
        self._shots = novel_shots(config)
        first = described(config)
        second = described(config, "partition.novel-dataset")
        for info in (first, second):
            check_classes("cross-dataset", info)
        if first.shape[:-2] != second.shape[:-2] or len(first.shape) != 3:
            raise ValueError(
                f"partition.novel-dataset is {second.name!r} with inputs {second.shape}; "
                f"{first.name} has {first.shape}"
            )
        self.dataset = configured(config)
        self.info: Info = self.dataset.info
        novel_dataset = translated(configured(config, "partition.novel-dataset"), self.dataset)

        # Each group is a federation of its own, whose clients all train.
        num_novel = int(self.novel.sum())
        training_config: Config = {
            **config,
            "partition": base_rule,
            "num-clients": self.num_clients - num_novel,
            "train-fraction": 1.0,
        }
        self._training = Federation(training_config, self.dataset)
        self.unlabeled = np.zeros_like(self.novel)
        self.unlabeled[~self.novel] = self._training.unlabeled
        self.public = self._training.public
        self.encoding = None
        self.words = ()
        self.targets = Targets(CLASSES)
        self._novel: Federation | None = None
        if num_novel:
            novel_config: Config = {
                **training_config,
                "num-clients": num_novel,
                "standardize": "none",  # the training clients' moments replace these below
                "seed": seed_of(self._seed, "novel dataset"),
                "partition.alpha": config["partition.novel-alpha"] or config["partition.alpha"],
                "partition.public-samples": 0,
                "partition.labeled-clients": 1.0,  # novel clients' labels are never hidden
                "partition.test-shift": "none",
                "partition.corruptions": config["partition.novel-corruptions"],
                "partition.novel-corruptions": "",
            }
            self._novel = Federation(novel_config, novel_dataset)
            self._novel._mean = self._training._mean
            self._novel._std = self._training._std
        # The number of each client within its group.
        self._number = np.where(self.novel, np.cumsum(self.novel), np.cumsum(~self.novel)) - 1

    @property
    def line(self) -> str:
        """The rows, the inputs and the labels of both datasets in one line for people."""
        if self._novel is None:
            return self._training.line
        return f"{self._training.line}; novel clients: {self._novel.line}"

    def share(self, client: int) -> Share:
        """The client's data. Raises ValueError for an id out of range."""
        self.check_client(client)
        is_novel = bool(self.novel[client])
        federation = self._novel if is_novel else self._training
        assert federation is not None  # there are novel clients, since this is one
        group_share = federation.share(int(self._number[client]))
        share = replace(
            group_share,
            novel=is_novel,
            attributes={**group_share.attributes, "dataset": federation.dataset.info.name},
            public=self.public,
            shots=0,
        )
        return share.with_shots(self._shots, seed_of(self._seed, "shots", client))
