"""Federations: a dataset partitioned among clients, with each client's role and share.

Users with preferences have their own (`partitions.preference_federation`), and so have two datasets
with common classes (`partitions.cross_federation`)."""

import logging
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from fedapps.common import external_code
from fedapps.common.seeds import seed_of
from fedapps.common.settings import keyword_arguments
from fedapps.common.spelling import did_you_mean
from fedapps.common.tasks import BINARY, CLASSES, VALUES, Targets
from partitions.cache import (
    TEST,
    TRAIN,
    VALIDATION,
    Assignment,
    RowsOfClients,
    cached_assignment,
    code_identity,
)
from partitions.columns import chosen_columns, complete_rows, owner_column
from partitions.datasets.description import (
    IMAGE,
    TABLE,
    TOKENS,
    Description,
    scaling,
)
from partitions.datasets.encoding import Encoding, fit, moments
from partitions.datasets.loading import (
    DATASETS,
    Dataset,
    Info,
    Moment,
    configured,
)
from partitions.datasets.readers.columns import LARGEST_EXACT
from partitions.datasets.words import most_frequent, renumbered
from partitions.rules.registry import (
    PARTITIONS,
    RULES,
    Config,
    Partition,
    changes,
)
from partitions.shares import (
    Samples,
    Share,
    without_labels,
)

logger = logging.getLogger(__name__)

DEFAULT_PUBLIC = -1  # public-samples: 5000, at most a sixth of the data
# The keys outside of "partition.…" that decide which client holds which rows.
PARTITION_KEYS = ("partition", "num-clients", "train-fraction", "seed")
SHARES_KEPT = 1000  # the number of clients whose shares stay in memory
STANDARDIZE = ("auto", "none", "channels", "training-clients")
PARTS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


class Federation:
    """`num_clients` clients of one dataset. The clients marked in `novel` (num_clients,) do not
    train.

    A client uses ``partition.validation-fraction`` of its samples for validation and
    ``partition.test-fraction`` for test, unless the rule partitions the dataset's test split.
    ``partition.public-samples`` samples belong to no client. A fraction
    ``partition.labeled-clients`` of the training clients has labels; the labels of the others are
    hidden. `dataset` replaces the configured one. Raises ValueError for settings that contradict
    each other or the data."""

    _about_owners = ""  # for people: that not all owners of a user's data are clients

    def __init__(self, config: Config, dataset: Dataset | None = None) -> None:
        self.num_clients = int(config["num-clients"])
        self._seed = int(config["seed"])
        self._fractions = _fractions(config)
        self._shots = novel_shots(config)
        self.novel = self._roles(float(config["train-fraction"]))
        self.unlabeled = self._unlabeled(float(config["partition.labeled-clients"]))
        rule_name = str(config["partition"])
        rule = PARTITIONS[rule_name]
        self._changes = changes(config, self.novel)
        num_public = int(config["partition.public-samples"])
        if num_public < DEFAULT_PUBLIC:
            raise ValueError(f"partition.public-samples is {num_public}; it must be at least 0")

        # The checks above need no data: wrong settings fail before a dataset is loaded.
        self.dataset, notes = complete_rows(config, dataset or configured(config))
        for note in notes:
            logger.warning("%s", note)
        self.info: Info = self.dataset.info
        if num_public == DEFAULT_PUBLIC:
            num_public = min(5000, len(self.dataset.y) // 6)
        self._check_task(rule_name, rule, config)
        self._check_enough_samples(num_public)
        self._parts = self._pools()

        assignment = self._cached_assignment(rule_name, rule, config, num_public)
        self._pooled = assignment.pooled
        self._attributes = assignment.attributes
        self._rows = assignment.rows
        for change in self._changes:
            changed = [change.rows(client, rows) for client, rows in enumerate(self._rows)]
            self._rows = RowsOfClients.of(changed)
        self._check_sizes(rule_name, rule, config)
        self._about_owners = self._unused_owners(owner_column(config, self.info))

        self.targets = self._read_targets()
        self.words: tuple[str, ...] = ()
        if self.dataset.words:
            self.words = self._number_words()
        self.encoding: Encoding | None = None
        if self.info.inputs is not None and self.info.inputs.kind == TABLE:
            self.encoding = self._encode(config)
        self._mean, self._std = self._scaling(scaling(config, self.info.inputs))
        self._shares: dict[int, Share] = {}
        self._shifted_tests = None
        if config["partition.test-shift"] != "none":
            from partitions.shifts.shifted_tests import ShiftedTests

            self._shifted_tests = ShiftedTests(config, self.dataset, self._seed, self._others)
        self.public: Samples | None = None
        if num_public:
            rows = torch.from_numpy(assignment.public)
            self.public = self._samples(self.dataset.x, self.dataset.y, rows)

    @property
    def line(self) -> str:
        """The rows, the inputs and the labels in one line for people."""
        scaled = ""
        if self._mean != 0.0 or self._std != 1.0:
            whose = "the dataset's" if self._mean == self.info.mean else "the training clients'"
            scaled = f" scaled by {whose} statistics"
        if self.encoding is not None:
            inputs = self.encoding.text(scaled)
        else:
            inputs = self.info.inputs_text + scaled
        if self.words:
            inputs += f" of the training clients' {len(self.words)} most frequent words"
        rows = f"{len(self.dataset.y)} rows"
        return f"{rows}, {inputs}, {self.info.labels_text}{self._about_owners}"

    def share(self, client: int) -> Share:
        """The client's data. Raises ValueError for an id out of range."""
        self.check_client(client)
        if client not in self._shares:
            if len(self._shares) == SHARES_KEPT:
                oldest = next(iter(self._shares))
                del self._shares[oldest]
            self._shares[client] = self._make_share(client)
        return self._shares[client]

    def rows(self, client: int) -> dict[str, np.ndarray]:
        """The dataset's rows that the client trains on, validates and tests with, by part."""
        rows = self._ordered(client)
        # As arrays: numpy reads a tensor of one index as a single number.
        return {name: rows[part.numpy()] for name, part in self._split(rows).items()}

    def check_client(self, client: int) -> None:
        """Raise ValueError for an id out of range."""
        if not 0 <= client < self.num_clients:
            raise ValueError(f"client {client} is not one of the {self.num_clients} clients")

    def _roles(self, fraction: float) -> np.ndarray:
        """Whether each client is novel, (num_clients,)."""
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
        labeled_clients = generator.permutation(training)[:count]
        unlabeled = ~self.novel
        unlabeled[labeled_clients] = False
        return unlabeled

    def _check_task(self, rule_name: str, rule: Partition, config: Config) -> None:
        """Raise ValueError if labels that are no classes meet settings that need classes."""
        task = self.info.task
        if task in (CLASSES, BINARY):
            return
        base_rule = RULES.get(str(config["partition.base-rule"]))
        needs = ""
        if rule.needs_classes:
            needs = f"partition {rule_name!r}"
        elif "base-rule" in rule.options and base_rule is not None and base_rule.needs_classes:
            needs = f"partition.base-rule {config['partition.base-rule']!r}"
        elif "class-shards" in rule.options and config["partition.class-shards"]:
            needs = "partition.class-shards"
        elif config["partition.permuted-labels"]:
            needs = "partition.permuted-labels"
        elif config["partition.test-shift"] != "none":
            needs = "partition.test-shift"
        if needs:
            able = ", ".join(name for name, other in RULES.items() if not other.needs_classes)
            raise ValueError(
                f"{needs} needs one class for each sample, but the task of {self.info.name} is "
                f"{task!r}; set partition to one of {able}"
            )

    def _read_targets(self) -> Targets:
        """What the labels mean. Values are standardised, by the mean and the deviation of each
        output over the training clients' training samples."""
        task = self.info.task
        if task != VALUES:
            return Targets(task)
        values = self.dataset.y[torch.from_numpy(self._training_rows())]
        mean = values.mean(0)
        deviation = values.std(0, correction=0)
        # Rounding leaves a deviation of equal numbers such as 0.1.
        constant = torch.nonzero(values.amin(0) == values.amax(0))
        if len(constant):
            raise ValueError(
                f"{self.info.name}: output {int(constant[0])} is the same number in "
                "all training samples; there is nothing to learn"
            )
        standardised = ((self.dataset.y - mean) / deviation).float()
        self.dataset = replace(self.dataset, y=standardised)
        return Targets(task, tuple(mean.tolist()), tuple(deviation.tolist()))

    def _check_enough_samples(self, num_public: int) -> None:
        num_samples = len(self.dataset.y)
        if num_public >= num_samples:
            raise ValueError(
                f"partition.public-samples is {num_public}, but {self.info.name} has only "
                f"{num_samples} samples"
            )
        if self.num_clients > num_samples - num_public:
            raise ValueError(
                f"num-clients is {self.num_clients}, more than the {num_samples - num_public} "
                f"samples of {self.info.name}"
            )

    def _pools(self) -> np.ndarray:
        """TRAIN, VALIDATION or TEST for each row: the official split, where a part of the training
        samples, drawn by seed, becomes VALIDATION, unless the data have a validation split."""
        num_train = self.dataset.num_train
        parts = np.full(len(self.dataset.y), TRAIN)
        parts[num_train:] = TEST
        if self.dataset.num_validation:  # given, so none of the training samples is taken
            parts[num_train:][: self.dataset.num_validation] = VALIDATION
            return parts
        generator = np.random.default_rng(seed_of(self._seed, "pools"))
        order = generator.permutation(self.dataset.num_train)
        num_validation = round(self._fractions["validation"] * len(order))
        parts[order[:num_validation]] = VALIDATION
        return parts

    def _cached_assignment(
        self, rule_name: str, rule: Partition, config: Config, num_public: int
    ) -> Assignment:
        """The assignment of rows, from the cache if an earlier process has made it."""
        identity: dict[str, object] = {}
        for key, value in config.items():
            if key in PARTITION_KEYS or key.startswith("partition."):
                identity[key] = value
        if external_code.is_reference(rule_name):
            options = keyword_arguments(config, rule_name)
            identity["code"] = code_identity(rule_name, options)
        if rule.version:
            identity["version"] = rule.version
        identity["partition.public-samples"] = num_public
        return cached_assignment(
            self.dataset.key, identity, lambda: self._assign(rule, config, num_public)
        )

    def _assign(self, rule: Partition, config: Config, num_public: int) -> Assignment:
        """Each client's rows by the partitioner, which sees labels, columns and row numbers."""
        import datasets

        from partitions.rules.partitioner import RowsPartitioner

        partitioner = rule.make(config, self.novel)
        num_samples = len(self.dataset.y)
        if "shards-per-client" in rule.options:
            shards = self.num_clients * int(config["partition.shards-per-client"])
            if shards > num_samples - num_public:
                raise ValueError(
                    f"partition.shards-per-client is {config['partition.shards-per-client']}; "
                    f"{shards} shards for {num_samples - num_public} samples"
                )
        generator = np.random.default_rng(seed_of(self._seed, "rows"))
        public, rows = np.split(generator.permutation(num_samples), [num_public])
        columns = {name: values[rows] for name, values in self.dataset.columns.items()}
        owner = owner_column(config, self.info)
        if owner and self.info.inputs is not None:
            columns[owner] = self._owners(owner)[rows]
        labels = self.dataset.y.numpy()[rows]
        if labels.ndim == 2:  # the rule needs no classes
            labels = np.zeros(len(labels), dtype=np.int64)
        columns["label"] = labels
        columns["row"] = rows
        columns["part"] = self._parts[rows]
        partitioner.dataset = datasets.Dataset.from_dict(columns)

        rows_of: list[np.ndarray] = []
        attributes: list[dict[str, float | int | str]] = []
        if isinstance(partitioner, RowsPartitioner):
            for client in range(self.num_clients):
                rows_of.append(rows[partitioner.rows(client)])
                attributes.append(partitioner.attributes(client))
            return Assignment.of(rows_of, public, partitioner.pooled, attributes)
        for client in range(self.num_clients):
            partition = partitioner.load_partition(client).with_format("numpy")
            rows_of.append(partition[:]["row"])
        return Assignment.of(rows_of, public, False, [])

    def _owners(self, name: str) -> np.ndarray:
        """The values of the column whose values are the clients, (n,). Raises ValueError if there
        is no such column, and for gaps."""
        columns = self.dataset.columns
        description = self.info.inputs or Description()
        if name in columns:
            owners = columns[name]
            is_float = owners.dtype.kind == "f"
            gaps = np.flatnonzero(~np.isfinite(owners) if is_float else owners == "")
        elif name in description.names:
            cells = self.dataset.x.numpy()[:, description.names.index(name)]
            gaps = np.flatnonzero(~np.isfinite(cells))
            if np.nanmax(np.abs(cells), initial=0) > LARGEST_EXACT:
                raise ValueError(
                    f"{self.info.name}: column {name}, whose values are the clients, holds numbers "
                    f"above {LARGEST_EXACT}, which are rounded as decimals, so that clients could "
                    "be mixed; write them as texts, with a letter before each, as u12345"
                )
            whole = np.nan_to_num(cells).astype(np.int64)
            owners = whole if (whole == cells)[np.isfinite(cells)].all() else cells
        else:
            known = (*description.names, *columns)
            raise ValueError(
                f"partition.column is {name!r}, but {self.info.name} has no such column"
                f"{did_you_mean(name, known)}; its columns: {', '.join(dict.fromkeys(known)):.500}"
            )
        if len(gaps):
            raise ValueError(
                f"{self.info.name}: column {name}, whose values are the clients, has {len(gaps)} "
                f"empty cells, the first in row {gaps[0]} (from 0); fill them in, or leave these "
                "rows out"
            )
        return owners

    def _unused_owners(self, owner: str) -> str:
        """How many values of the clients' column of a user's own data are clients; "" if all
        are."""
        if not owner or self.info.inputs is None:
            return ""
        count = len(np.unique(self._owners(owner)))
        if count <= self.num_clients:
            return ""
        rows = int(self._rows.sizes.sum())
        return (
            f"; {self.num_clients} of {count} values of {owner} are clients, with {rows} of the "
            "rows (num-clients)"
        )

    def _check_sizes(self, rule_name: str, rule: Partition, config: Config) -> None:
        """Raise ValueError for clients with too few samples, or with none to train on."""
        sizes = self._rows.sizes
        minimum = np.where(self.novel & rule.sparse, 0, 2)
        too_small = np.flatnonzero(sizes < minimum).tolist()
        if too_small:
            first_ones = ", ".join(map(str, too_small[:5]))
            if len(too_small) > 5:
                first_ones += ", …"
            other = f"a milder partition than {rule_name!r}"
            if "alpha" in rule.options:
                other = f"a larger partition.alpha than {config['partition.alpha']:g}"
            raise ValueError(
                f"clients {first_ones} got fewer than 2 samples; use fewer clients than "
                f"num-clients={self.num_clients} or {other}"
            )
        training = np.flatnonzero(~self.novel)
        by_size = training[np.argsort(sizes[training], kind="stable")]
        if not self._splits_by_part():
            # The split depends on the number of rows alone: one client of each size will do.
            _, firsts = np.unique(sizes[by_size], return_index=True)
            by_size = by_size[firsts]
        for client in by_size.tolist():
            parts = self._split(self._rows[client])
            if not len(parts["train"]):
                taken = ", ".join(f"{len(rows)} for {part}" for part, rows in parts.items())
                raise ValueError(
                    f"client {client} has {len(self._rows[client])} samples ({taken}), and none is "
                    f"left to train on; use fewer clients than num-clients={self.num_clients}, or "
                    "set partition.test-fraction or partition.validation-fraction to 0"
                )

    def _scaling(self, standardize: str) -> tuple[Moment, Moment]:
        """Mean and standard deviation by which inputs in [0, 1] are standardised."""
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

    def _moments(self) -> tuple[Moment, Moment]:
        """Mean and standard deviation over `_moment_rows`' inputs: of each column or channel, and
        over all pixels of images. Raises ValueError if all numbers are equal."""
        x = self.dataset.x[self._moment_rows()].double() / self.info.scale
        deviation = float(x.std()) if x.min() < x.max() else 0.0
        described = self.info.inputs is not None  # a user's own data are scaled unasked
        if not deviation > 0 and not described:
            raise ValueError(
                "standardize is 'training-clients', but all numbers in the training clients' "
                "inputs are equal; set it to 'none'"
            )
        if len(self.info.shape) == 3 or self._is_image():
            return float(x.mean()), deviation or 1.0
        by_column = x.transpose(0, 1).flatten(1).T.numpy()  # (numbers of a column or channel, d)
        mean, std = moments(by_column)
        std[std == 0] = 1  # a constant column becomes zero
        if self.encoding is not None:
            mean[~self.encoding.scaled] = 0
            std[~self.encoding.scaled] = 1
        return tuple(mean.tolist()), tuple(std.tolist())

    def _is_image(self) -> bool:
        return self.info.inputs is not None and self.info.inputs.kind == IMAGE

    def _moment_rows(self) -> torch.Tensor:
        """The training clients' training rows, in order."""
        return torch.from_numpy(np.sort(self._training_rows()))

    def _training_rows(self) -> np.ndarray:
        """The training clients' training rows, by client."""
        training = np.flatnonzero(~self.novel).tolist()
        return np.concatenate([self.rows(client)["train"] for client in training])

    def _encode(self, config: Config) -> Encoding:
        """Replace a table's cells by the columns that the network gets, learnt from the training
        clients' training rows."""
        description = self.info.inputs
        assert description is not None
        source = self.info.name
        names, notes = chosen_columns(config, self.info)
        cells = self.dataset.x.numpy()
        encoding = fit(
            cells,
            description,
            self._training_rows(),
            names,
            str(config["missing"]),
            source,
            notes,
        )
        x = encoding.encode(cells, description, source, notes)
        for note in notes:
            logger.warning("%s", note)
        self.info = replace(self.info, shape=x.shape[1:])
        self.dataset = replace(self.dataset, info=self.info, x=torch.from_numpy(x))
        return encoding

    def _number_words(self) -> tuple[str, ...]:
        """Number the tokens by the words that are most frequent in the training clients' training
        rows. Returns these words."""
        x = self.dataset.x.numpy()
        known = self.dataset.words
        kept = most_frequent(x, self._training_rows(), known)
        self.dataset = replace(self.dataset, x=torch.from_numpy(renumbered(x, known, kept)))
        return kept

    def _ordered(self, client: int) -> np.ndarray:
        """The client's rows in the random order by which they are split into parts."""
        generator = np.random.default_rng(seed_of(self._seed, "split", client))
        return generator.permutation(self._rows[client])

    def _make_share(self, client: int) -> Share:
        """The client's share, after all changes."""
        is_novel = bool(self.novel[client])
        rows = self._ordered(client)
        split = self._split(rows)
        x, y, index = self._changed(client, rows)
        if self._shifted_tests is not None and not is_novel:
            x_test, y_test = self._shifted_tests(client, *self._tests[client])
            # Copies: the dataset's tensors belong to all clients.
            x = x[index].to(x_test.dtype)
            y = y[index]
            index = torch.arange(len(rows))
            x[split["test"]] = x_test
            y[split["test"]] = y_test
        attributes: dict[str, float | int | str] = {}
        if y.ndim == 1:
            attributes["classes"] = len(self.dataset.y[torch.from_numpy(rows)].unique())
        if self.unlabeled[client]:
            y = without_labels(y)
        parts = {name: self._samples(x, y, index[part]) for name, part in split.items()}
        if self._attributes:
            attributes |= self._attributes[client]
        for change in self._changes:
            attributes |= change.attributes(client)
        share = Share(
            parts["train"],
            parts["validation"],
            parts.get("test"),
            self._samples(x, y, index),
            is_novel,
            attributes,
            self.public,
            targets=self.targets,
        )
        return share.with_shots(self._shots, seed_of(self._seed, "shots", client))

    def _changed(
        self, client: int, rows: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs x and labels y after the changes, and the positions of the client's `rows` in
        them. Without a change, x and y are the whole dataset, uncopied."""
        x = self.dataset.x
        y = self.dataset.y
        index = torch.from_numpy(rows)
        for change in self._changes:
            changed_x = change.inputs(client, x[index])
            if changed_x is not None:
                x = changed_x
                y = y[index]
                index = torch.arange(len(index))
            changed_y = change.labels(client, y[index])
            if changed_y is not None:
                x = x[index]
                y = changed_y
                index = torch.arange(len(index))
        return x, y, index

    @cached_property
    def _tests(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and labels of each training client's test samples, before a shift."""
        tests = {}
        for client in np.flatnonzero(~self.novel).tolist():
            rows = self._ordered(client)
            x, y, index = self._changed(client, rows)
            test_index = index[self._split(rows).get("test", slice(0))]
            if not len(test_index):
                raise ValueError(
                    f"partition.test-shift changes test samples, and client {client} has none; set "
                    "partition.test-fraction"
                )
            tests[client] = (x[test_index], y[test_index])
        return tests

    def _others(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels of the other training clients' test samples. ValueError if this is the
        only training client."""
        if len(self._tests) < 2:
            raise ValueError("partition.test-shift needs the test samples of two training clients")
        others = [samples for other, samples in self._tests.items() if other != client]
        x = torch.cat([inputs for inputs, _ in others])
        y = torch.cat([labels for _, labels in others])
        return x, y

    def _split(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Positions of a client's training, validation and test samples among its rows."""
        if self._splits_by_part():
            pooled_parts = self._parts[rows]
            positions = {}
            for name, part in PARTS.items():
                if part == TEST and not self._pooled and not (self._parts == TEST).any():
                    continue
                positions[name] = torch.from_numpy(np.flatnonzero(pooled_parts == part))
            return positions
        counts = []
        for fraction in (self._fractions["validation"], self._fractions["test"]):
            count = round(fraction * len(rows))
            if fraction:
                count = max(1, count)
            counts.append(count)
        ends = np.cumsum(counts).tolist()
        validation, test, train = torch.arange(len(rows)).tensor_split(ends)
        parts = {"train": train, "validation": validation}
        if self._fractions["test"]:
            parts["test"] = test
        return parts

    def _splits_by_part(self) -> bool:
        """Whether `_split` follows `_parts`, and not the number of a client's rows alone."""
        return self._pooled or self._has_given_split()

    def _has_given_split(self) -> bool:
        """Whether the user's own data came with a validation or a test split, which every rule
        keeps."""
        is_own = self.info.inputs is not None
        return is_own and self.dataset.num_train < len(self.dataset.y)

    def _samples(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Samples:
        info = self.dataset.info
        is_whole = info.inputs is not None and info.inputs.kind == TOKENS
        return Samples(x, y, index, info.scale, self._mean, self._std, whole=is_whole)


def novel_shots(config: Config) -> int:
    """The number of labeled samples of each class that a novel client trains on. ValueError if it
    is negative."""
    shots = int(config.get("novel-shots", 0))
    if shots < 0:
        raise ValueError(f"novel-shots is {shots}; it must not be negative")
    return shots


def check_classes(rule: str, info: Info) -> None:
    """Raise ValueError for a dataset without one class for each sample."""
    if info.task != CLASSES:
        raise ValueError(
            f"partition {rule!r} needs one class for each sample, but the task of {info.name} is "
            f"{info.task!r}"
        )


def _fractions(config: Config) -> dict[str, float]:
    """The fractions of a client's samples by part; ValueError if none are left to train on."""
    fractions = {
        "validation": float(config["partition.validation-fraction"]),
        "test": float(config["partition.test-fraction"]),
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
