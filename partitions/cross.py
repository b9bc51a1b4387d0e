"""Training clients of one dataset, novel clients of another with the same classes.

ODPFL-HN, section 6.8: CIFAR-10 to STL-10. The other dataset's inputs are resized to the first
one's, its classes are matched by name, and classes without a counterpart are left out (see
`partitions.translation`). The base rule partitions both (ours)."""

import numpy as np

from partitions.base import Federation, novel_shots
from partitions.datasets import Info, configured, described
from partitions.registry import BASES, Config
from partitions.seeds import seed_of
from partitions.shares import Share
from partitions.translation import translated


class CrossFederation(Federation):
    """Training clients hold ``dataset``, novel clients ``partition.novel-dataset``.

    Raises ValueError if the two have no common class or different numbers of channels."""

    def __init__(self, config: Config) -> None:
        base = str(config["partition.base"])
        if base not in BASES:
            raise ValueError(f"partition.base is {base!r}; known: {', '.join(BASES)}")
        if config["partition.permuted-labels"] or config["partition.corruption-every"]:
            raise ValueError(
                "partition 'cross-dataset' takes neither permuted-labels nor corruption-every"
            )
        self.num_clients, self._seed = int(config["num-clients"]), int(config["seed"])
        self.novel = self._roles(float(config["train-fraction"]))
        self._shots = novel_shots(config)
        known = described(config), described(config, "partition.novel-dataset")
        if known[0].shape[:-2] != known[1].shape[:-2] or len(known[0].shape) != 3:
            raise ValueError(
                f"partition.novel-dataset is {known[1].name!r} with inputs {known[1].shape}; "
                f"{known[0].name} has {known[0].shape}"
            )
        self.dataset = configured(config)
        self.info: Info = self.dataset.info
        other = translated(configured(config, "partition.novel-dataset"), self.dataset)
        self._of: list[Federation | None] = []
        for dataset, role in ((self.dataset, ~self.novel), (other, self.novel)):
            changes: Config = {
                "partition": base,
                "num-clients": int(role.sum()),
                "train-fraction": 1.0,
            }
            if dataset is other:
                changes = {
                    **changes,
                    "standardize": "none",  # see below
                    "seed": seed_of(self._seed, "novel dataset"),
                    "partition.alpha": config["partition.novel-alpha"] or config["partition.alpha"],
                    "partition.public-samples": 0,
                    "partition.labeled-clients": 1.0,  # all are novel
                    "partition.test-shift": "none",
                    "partition.corruptions": config["partition.novel-corruptions"],
                    "partition.novel-corruptions": "",
                }
            self._of.append(Federation({**config, **changes}, dataset) if role.any() else None)
        self._place = np.where(self.novel, np.cumsum(self.novel), np.cumsum(~self.novel)) - 1
        train, others = self._of
        assert train is not None  # a training client exists
        self.public = train.public
        if others is not None:  # standardised by the training clients' moments
            others._mean, others._std = train._mean, train._std

    def share(self, client: int) -> Share:
        """The client's data. Raises ValueError for an id out of range."""
        self.check_client(client)
        novel = bool(self.novel[client])
        federation = self._of[novel]
        assert federation is not None
        share = federation.share(int(self._place[client]))
        attributes = {**share.attributes, "dataset": federation.dataset.info.name}
        parts = (share.train, share.validation, share.test, share.everything)
        whole = Share(*parts, novel, attributes, self.public)
        return whole.with_shots(self._shots, seed_of(self._seed, "shots", client))
