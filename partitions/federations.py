"""A dataset partitioned among clients: their roles, and each client's share.

A federation of one dataset, of users with preferences, or of two datasets with common classes."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedapps.common import external_code
from fedapps.common.seeds import seed_of
from partitions.cache import TEST, TRAIN, VALIDATION, Assignment, cached_assignment, code_identity
from partitions.datasets.loading import (
    DATASETS,
    Dataset,
    Info,
    Moment,
    configured,
    described,
    preference_info,
)
from partitions.datasets.readers.raw import UNLABELED
from partitions.rules.registry import BASES, PARTITIONS, Config, Partition, changes
from partitions.shares import SUB_POPULATION, PreferredSamples, Samples, Share
from partitions.shifts.translation import translated

DEFAULT_PUBLIC = -1  # of public samples: 5000, at most a sixth of the data
PARTITION_KEYS = ("partition", "num-clients", "train-fraction", "seed")  # decide who holds what
SHARES_KEPT = 1000  # clients whose shares stay in memory; those of others are cut again
STANDARDIZE = ("none", "channels", "training-clients")
PARTS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


class Federation:
    """`num_clients` clients of one dataset; `novel` (num_clients,) ones take no part in training.

    A client keeps ``partition.validation-fraction`` of its samples for validation and
    ``partition.test-fraction`` for test, unless the rule partitions the dataset's own test samples.
    ``partition.public-samples`` belong to no client. Of the training clients a share of
    ``partition.labeled-clients`` has labels; all labels of the others are hidden.
    `dataset` may replace the configured one. Raises ValueError for settings that cannot be met."""

    def __init__(self, config: Config, dataset: Dataset | None = None) -> None:
        self.num_clients = int(config["num-clients"])
        self._seed = int(config["seed"])
        self._fractions = _fractions(config)
        self._shots = novel_shots(config)
        self.novel = self._roles(float(config["train-fraction"]))
        self.unlabeled = self._unlabeled(float(config["partition.labeled-clients"]))
        entry = PARTITIONS[str(config["partition"])]
        self._changes = changes(config, self.novel)
        hidden = int(config["partition.public-samples"])
        if hidden < DEFAULT_PUBLIC:
            raise ValueError(f"partition.public-samples is {hidden}; it must be at least 0")
        self.dataset = dataset or configured(config)
        if hidden == DEFAULT_PUBLIC:
            hidden = min(5000, len(self.dataset.y) // 6)
        self.info: Info = self.dataset.info
        if hidden >= len(self.dataset.y):
            raise ValueError(
                f"partition.public-samples is {hidden}, but {self.info.name} has only "
                f"{len(self.dataset.y)} samples"
            )
        if self.num_clients > len(self.dataset.y) - hidden:
            raise ValueError(
                f"num-clients is {self.num_clients}, more than the {len(self.dataset.y) - hidden} "
                f"samples of {self.info.name}"
            )
        self._parts = self._pools()
        relevant: dict[str, object] = {
            k: v for k, v in config.items() if k in PARTITION_KEYS or k.startswith("partition.")
        }
        if external_code.is_reference(rule := str(config["partition"])):
            relevant["code"] = code_identity(rule, external_code.options(config, rule))
        relevant["partition.public-samples"] = hidden
        assigned = cached_assignment(
            self.dataset.key, relevant, lambda: self._assign(entry, config, hidden)
        )
        self._pooled, self._attributes = assigned.pooled, assigned.attributes
        self._rows = assigned.rows
        for change in self._changes:
            self._rows = [change.rows(i, rows) for i, rows in enumerate(self._rows)]
        self._check_sizes(str(config["partition"]), entry.sparse)
        self._mean, self._std = self._scaling(str(config["standardize"]))
        self._shares: dict[int, Share] = {}
        self._shifted_tests = None
        if config["partition.test-shift"] != "none":
            from partitions.shifts.shifted_tests import ShiftedTests

            self._shifted_tests = ShiftedTests(config, self.dataset, self._seed, self._others)
        public = self._samples(self.dataset.x, self.dataset.y, torch.from_numpy(assigned.public))
        self.public = public if hidden else None

    def share(self, client: int) -> Share:
        """The client's data. Raises ValueError for an id out of range."""
        self.check_client(client)
        if client not in self._shares:
            if len(self._shares) == SHARES_KEPT:
                del self._shares[next(iter(self._shares))]  # the oldest
            self._shares[client] = self._cut(client)
        return self._shares[client]

    def rows(self, client: int) -> dict[str, np.ndarray]:
        """The dataset's rows that the client trains on, validates and tests with, by part."""
        rows = self._ordered(client)
        return {name: rows[part] for name, part in self._split(rows).items()}

    def check_client(self, client: int) -> None:
        """Raise ValueError for an id out of range."""
        if not 0 <= client < self.num_clients:
            raise ValueError(f"client {client} is not one of the {self.num_clients} clients")

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

    def _unlabeled(self, labeled: float) -> np.ndarray:
        """Whether each client is a training client without labels, (num_clients,)."""
        training = np.flatnonzero(~self.novel)
        count = max(1, round(labeled * len(training)))
        generator = np.random.default_rng(seed_of(self._seed, "labeled"))
        unlabeled = ~self.novel
        unlabeled[generator.permutation(training)[:count]] = False
        return unlabeled

    def _pools(self) -> np.ndarray:
        """TRAIN, VALIDATION or TEST for each row: the official split, validation drawn by seed."""
        parts = np.full(len(self.dataset.y), TRAIN)
        parts[self.dataset.num_train :] = TEST
        generator = np.random.default_rng(seed_of(self._seed, "pools"))
        order = generator.permutation(self.dataset.num_train)
        parts[order[: round(self._fractions["validation"] * len(order))]] = VALIDATION
        return parts

    def _assign(self, entry: Partition, config: Config, hidden: int) -> Assignment:
        """Each client's rows by the partitioner, which sees labels, columns and row numbers."""
        import datasets

        from partitions.rules.partitioner import RowsPartitioner

        rule = entry.make(config, self.novel)
        if "shards-per-client" in entry.options:
            shards = self.num_clients * int(config["partition.shards-per-client"])
            if shards > len(self.dataset.y) - hidden:
                raise ValueError(
                    f"partition.shards-per-client is {config['partition.shards-per-client']}; "
                    f"{shards} shards for {len(self.dataset.y) - hidden} samples"
                )
        generator = np.random.default_rng(seed_of(self._seed, "rows"))
        public, rows = np.split(generator.permutation(len(self.dataset.y)), [hidden])
        columns = {name: values[rows] for name, values in self.dataset.columns.items()}
        columns |= {"label": self.dataset.y.numpy()[rows], "row": rows, "part": self._parts[rows]}
        rule.dataset = datasets.Dataset.from_dict(columns)
        clients = range(self.num_clients)
        if isinstance(rule, RowsPartitioner):
            assigned = [rows[rule.rows(i)] for i in clients]
            return Assignment(assigned, public, rule.pooled, [rule.attributes(i) for i in clients])
        assigned = [rule.load_partition(i).with_format("numpy")[:]["row"] for i in clients]
        return Assignment(assigned, public, False, [{} for _ in clients])

    def _check_sizes(self, name: str, sparse: bool) -> None:
        least = np.where(self.novel & sparse, 0, 2)
        if empty := [i for i, rows in enumerate(self._rows) if len(rows) < least[i]]:
            some = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
            raise ValueError(
                f"clients {some} got fewer than 2 samples; use fewer clients than num-clients="
                f"{self.num_clients} or a milder partition than {name!r}"
            )
        training = [client for client in range(self.num_clients) if not self.novel[client]]
        for client in sorted(training, key=lambda client: len(self._rows[client])):
            parts = self._split(self._rows[client])
            if not len(parts["train"]):
                taken = ", ".join(f"{len(rows)} for {part}" for part, rows in parts.items())
                raise ValueError(
                    f"client {client} has {len(self._rows[client])} samples ({taken}), and none is "
                    f"left to train on; use fewer clients than num-clients={self.num_clients}, or "
                    "set partition.test-fraction or partition.validation-fraction to 0"
                )

    def _scaling(self, standardize: str) -> tuple[Moment, Moment]:
        """Mean and deviation by which inputs in [0, 1] are standardised."""
        if standardize == "none":
            return 0.0, 1.0
        if standardize == "training-clients":
            return self._moments()
        if standardize != "channels":
            raise ValueError(f"unknown standardize {standardize!r}; known: {STANDARDIZE}")
        if not self.info.std:
            known = ", ".join(name for name, entry in DATASETS.items() if entry.std)
            raise ValueError(
                f"standardize is 'channels', but {self.info.name} has no customary constants; "
                f"datasets that have: {known}; 'training-clients' takes any dataset"
            )
        return self.info.mean, self.info.std

    def _moments(self) -> tuple[float, float]:
        """Mean and deviation of `_moment_rows`' inputs, over all pixels. Raises ValueError for
        inputs that are all equal."""
        x = self.dataset.x[self._moment_rows()].double() / self.info.scale
        deviation = float(x.std())
        if not deviation > 0:
            raise ValueError(
                "standardize is 'training-clients', but all numbers in the training clients' "
                "inputs are equal; set it to 'none'"
            )
        return float(x.mean()), deviation

    def _moment_rows(self) -> torch.Tensor:
        """The training clients' rows."""
        rows = np.concatenate([self._rows[i] for i in np.flatnonzero(~self.novel)])
        return torch.from_numpy(np.sort(rows))

    def _ordered(self, client: int) -> np.ndarray:
        generator = np.random.default_rng(seed_of(self._seed, "split", client))
        return generator.permutation(self._rows[client])

    def _cut(self, client: int) -> Share:
        rows, data = self._ordered(client), self.dataset
        x, y, at = self._changed(client, rows)
        index, split = torch.from_numpy(rows), self._split(rows)
        if self._shifted_tests is not None and not self.novel[client]:
            x, y, at = x[at], y[at], torch.arange(len(rows))
            x_test, y[split["test"]] = self._shifted_tests(client, *self._tests[client])
            x = x.to(x_test.dtype)
            x[split["test"]] = x_test
        if self.unlabeled[client]:
            y = y.new_tensor(UNLABELED).expand(len(y))
        parts = {name: self._samples(x, y, at[p]) for name, p in split.items()}
        attributes = {"classes": len(data.y[index].unique())} | self._attributes[client]
        for change in self._changes:
            attributes |= change.attributes(client)
        share = Share(
            parts["train"],
            parts["validation"],
            parts.get("test"),
            self._samples(x, y, at),
            bool(self.novel[client]),
            attributes,
            self.public,
        )
        return share.with_shots(self._shots, seed_of(self._seed, "shots", client))

    def _changed(
        self, client: int, rows: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs and labels, after the changes, and which of them are the client's `rows`."""
        x, y, at = self.dataset.x, self.dataset.y, torch.from_numpy(rows)
        for change in self._changes:  # a change makes copies
            if (inputs := change.inputs(client, x[at])) is not None:
                x, y, at = inputs, y[at], torch.arange(len(at))
            if (labels := change.labels(client, y[at])) is not None:
                x, y, at = x[at], labels, torch.arange(len(at))
        return x, y, at

    @cached_property
    def _tests(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The test samples of each training client, before a shift."""
        tests = {}
        for client in np.flatnonzero(~self.novel).tolist():
            rows = self._ordered(client)
            x, y, at = self._changed(client, rows)
            at = at[self._split(rows).get("test", slice(0))]
            tests[client] = x[at], y[at]
        if empty := [client for client, (_, y) in tests.items() if not len(y)]:
            raise ValueError(
                f"partition.test-shift changes test samples, and client {empty[0]} has none; set "
                "partition.test-fraction"
            )
        return tests

    def _others(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The test samples of the other training clients. ValueError if there is none."""
        if len(self._tests) < 2:
            raise ValueError("partition.test-shift needs the test samples of two training clients")
        x, y = zip(*(t for other, t in self._tests.items() if other != client), strict=True)
        return torch.cat(x), torch.cat(y)

    def _split(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Positions of a client's training, validation and test samples among its rows."""
        if self._pooled:
            parts = self._parts[rows]
            return {n: torch.from_numpy(np.flatnonzero(parts == p)) for n, p in PARTS.items()}
        counts = [max(1, round(f * len(rows))) if f else 0 for f in self._fractions.values()]
        validation, test, train = torch.arange(len(rows)).tensor_split(np.cumsum(counts).tolist())
        parts = {"train": train, "validation": validation}
        return parts | {"test": test} if self._fractions["test"] else parts

    def _samples(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Samples:
        return Samples(x, y, index, self.dataset.info.scale, self._mean, self._std)


def novel_shots(config: Config) -> int:
    """Labeled samples of each class that a novel client learns from. ValueError if negative."""
    shots = int(config.get("novel-shots", 0))
    if shots < 0:
        raise ValueError(f"novel-shots is {shots}; it must not be negative")
    return shots


def _fractions(config: Config) -> dict[str, float]:
    fractions = {
        name: float(config[f"partition.{name}-fraction"]) for name in ("validation", "test")
    }
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise ValueError(f"partition.{name}-fraction is {fraction}; it must lie in [0, 1)")
    if sum(fractions.values()) >= 1:
        raise ValueError(
            f"partition.validation-fraction {fractions['validation']} and partition.test-fraction "
            f"{fractions['test']} leave nothing to train on"
        )
    return fractions


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


class CrossFederation(Federation):
    """Training clients hold ``dataset``, novel clients ``partition.novel-dataset``.

    ODPFL-HN, section 6.8: CIFAR-10 to STL-10. The other dataset's inputs are resized to the first
    one's, its classes are matched by name, and classes without a counterpart are left out (see
    `partitions.shifts.translation`). The base rule partitions both (ours).

    Raises ValueError if the two have no common class or different numbers of channels."""

    def __init__(self, config: Config) -> None:
        base = str(config["partition.base-rule"])
        if base not in BASES:
            raise ValueError(f"partition.base-rule is {base!r}; known: {', '.join(BASES)}")
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
