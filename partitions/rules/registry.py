"""name → partition rule, with its options (keys ``partition.<option>``)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapps.common import external_code
from fedapps.common.seeds import seed_of
from fedapps.common.settings import COUNT, NONNEGATIVE, POSITIVE_INT, Configured, key_of, setting

if TYPE_CHECKING:
    from partitions.shifts.changes import Change

Config = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Partition:
    """A rule: ``make(config, novel)`` gives flwr-datasets' Partitioner for the roles `novel`,
    bool (num_clients,); ``change(config, novel)`` what is done to clients afterwards.

    Both raise ValueError for bad options; neither needs any data. A `sparse` rule may leave novel
    clients without samples."""

    make: Callable[[Config, np.ndarray], Any]
    summary: str
    options: tuple[str, ...] = ()
    change: "Callable[[Config, np.ndarray], Change] | None" = None
    sparse: bool = False


def _make(place: str, config: Config, novel: np.ndarray, **more: Any) -> Any:
    """The Partitioner ``module:NAME`` with what it takes of the options, by name."""
    given = _given(config, novel) | external_code.options(config, "partition") | more
    return external_code.call_with(place, resolve_name(place), given, {})


def _given(config: Config, novel: np.ndarray) -> dict[str, Any]:
    """What every rule may take beside its options, by name."""
    count = len(novel)
    given = {"num_clients": count, "num_partitions": count, "partition_by": "label"}
    return given | {"novel": novel, "seed": _seed(config)}


def _shards(config: Config, novel: np.ndarray) -> Any:
    count = config["partition.shards-per-client"]
    place = "flwr_datasets.partitioner:ShardPartitioner"
    return _make(place, config, novel, num_shards_per_partition=count)


def _by_classes(place: str, config: Config, novel: np.ndarray) -> Any:
    from partitions.datasets.loading import described

    known, count = described(config), int(config["partition.classes-per-client"])
    if count > known.num_classes:
        raise ValueError(
            f"partition.classes-per-client is {count}, but {known.name} has only "
            f"{known.num_classes} classes"
        )
    return _make(place, config, novel)


def _by_alphas(place: str, config: Config, novel: np.ndarray) -> Any:
    alpha = config["partition.alpha"]
    other = config["partition.novel-alpha"] or alpha
    alphas = [other if one else alpha for one in novel]
    return _make(place, config, novel, alphas=alphas, novel_alpha=other)


def _natural(config: Config, novel: np.ndarray) -> Any:
    from partitions.datasets.loading import described

    known = described(config)
    column = str(config["partition.column"]) or next(iter(known.columns), "")
    if not column:
        raise ValueError(f"{known.name} has no natural column to divide it by")
    return _make("partitions.rules.natural:NaturalPartitioner", config, novel, column=column)


def _base(config: Config, novel: np.ndarray) -> Any:
    return RULES[str(config["partition.base-rule"])].make(config, novel)


def _rotation(config: Config, novel: np.ndarray) -> "Change":
    from partitions.shifts.changes import Rotation

    angles, novel_angles = (_angles(config, f"partition.{k}") for k in ("angles", "novel-angles"))
    how = str(config["partition.interpolation"])
    return Rotation(novel, angles, novel_angles, int(config["seed"]), how)


def _angles(config: Config, key: str) -> list[float]:
    try:
        angles = [float(word) for word in str(config[key]).split(",")]
    except ValueError as error:
        raise ValueError(f"{key} is {config[key]!r}; it must list degrees, as 0,30,60") from error
    if not all(map(math.isfinite, angles)):
        raise ValueError(f"{key} is {config[key]!r}; it must list finite degrees")
    return angles


def _change(place: str, config: Config, novel: np.ndarray) -> "Change":
    given = {"novel": novel, "seed": config["seed"]} | external_code.options(config, "partition")
    change: Change = external_code.call_with(place, resolve_name(place), given, {})
    return change


def changes(config: Config, novel: np.ndarray) -> "list[Change]":
    """What is done to the clients of any rule: the rule's change, corruptions, permuted labels."""
    rule, seed = PARTITIONS[str(config["partition"])], int(config["seed"])
    made = [rule.change(config, novel)] if rule.change else []
    training, others = (_listed(str(config[f"partition.{key}"])) for key in CORRUPTED)
    lists = (training, others)
    if not any(lists) and not config["partition.permuted-labels"]:
        return made
    from partitions.datasets.loading import described
    from partitions.shifts.changes import PermutedLabels
    from partitions.shifts.corruptions import UnseenCorruptions

    known = described(config)
    if any(lists):
        how = (int(config["partition.severity"]), int(config["partition.corruption-every"]))
        made.append(UnseenCorruptions(novel, lists, *how, known.shape, known.scale, seed))
    if config["partition.permuted-labels"]:
        made.append(PermutedLabels(novel, known.num_classes, seed))
    return made


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _preference(config: Config, novel: np.ndarray) -> Any:
    from partitions.datasets.loading import described
    from partitions.rules.preference import PreferencePartitioner, apportion

    counts = apportion(str(config["partition.shares"]), len(novel), described(config).num_classes)
    seed = seed_of(int(config["seed"]), "sub-populations")
    preferred = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    return PreferencePartitioner(
        preferred.tolist(),
        int(config["partition.samples-per-user"]),
        int(config["partition.validation-per-user"]),
        int(config["partition.test-per-user"]),
        _seed(config),
    )


def _seed(config: Config) -> int:
    return seed_of(int(config["seed"]), "partition") % 2**32  # flwr-datasets wants 32 bits


RULES = {
    "iid": Partition(
        partial(_make, "flwr_datasets.partitioner:IidPartitioner"),
        "every client a random sample of equal size",
    ),
    "shards": Partition(
        _shards, "label-sorted shards, some per client (McMahan et al.)", ("shards-per-client",)
    ),
    "pathological": Partition(
        partial(_by_classes, "partitions.rules.pathological:PathologicalPartitioner"),
        "at most some classes a client, equal sizes",
        ("classes-per-client", "equal-sizes"),
    ),
    "dirichlet": Partition(
        partial(_by_alphas, "partitions.rules.dirichlet:DirichletPartitioner"),
        "class proportions from a Dirichlet distribution",
        ("alpha", "novel-alpha"),
    ),
    "dirichlet-split": Partition(
        partial(_by_alphas, "partitions.rules.dirichlet_split:SplitDirichletPartitioner"),
        "Dirichlet shares of each class; novel clients hold the test split (FedTTA)",
        ("alpha", "novel-alpha"),
        sparse=True,
    ),
    "class-fraction": Partition(
        partial(_by_classes, "partitions.rules.class_fraction:ClassFractionPartitioner"),
        "some classes a client, random shares of each, test rows alike (pFedHN)",
        ("classes-per-client",),
    ),
    "dirichlet-novel": Partition(
        partial(_by_alphas, "partitions.rules.dirichlet:NormalizedDirichletPartitioner"),
        "normalised Dirichlet shares of each class, test rows alike (pFedHN)",
        ("alpha", "novel-alpha"),
    ),
    "step": Partition(
        partial(_make, "partitions.rules.step:StepPartitioner"),
        "a few major classes a client, the others few samples (ATP)",
        ("major-classes", "ratio", "samples-per-client"),
    ),
    "coarse": Partition(
        partial(_make, "partitions.rules.coarse:CoarsePartitioner"),
        "each superclass spread evenly over as many clients (CIFAR-100)",
    ),
    "natural": Partition(
        _natural, "a writer, alphabet, author or place a client", ("column", "min-samples")
    ),
    "rotated": Partition(
        partial(_make, "partitions.rules.iid:SubsetIidPartitioner"),
        "few samples, equal angles within a client (FedTTA)",
        ("samples", "class-shards", "angles", "novel-angles", "interpolation"),
        _rotation,
    ),
    "corrupted": Partition(
        _base,
        "a base rule; novel clients blurred or rotated (ODPFL-HN)",
        ("base-rule", "blur", "rotation"),
        partial(_change, "partitions.shifts.changes:Corruption"),
    ),
    "subsampled": Partition(
        _base,
        "a base rule; novel clients keep a share of their samples (ODPFL-HN)",
        ("base-rule", "keep-fraction"),
        partial(_change, "partitions.shifts.changes:Subsampling"),
    ),
    "cross-dataset": Partition(
        _base,
        "a base rule; novel clients hold another dataset with the same classes (ODPFL-HN)",
        ("base-rule", "novel-dataset"),
    ),
    "preference": Partition(
        _preference,
        "users prefer one type each and label by it (FedEmbed)",
        ("shares", "samples-per-user", "validation-per-user", "test-per-user"),
    ),
}
COMPOSED = ("cross-dataset", "preference")  # rules whose federation is of its own kind
BASES = [n for n, rule in RULES.items() if rule.change is None and n not in COMPOSED]


class Options(Configured):
    """The options of the rules, keys ``partition.<option>``; a row of `RULES` names those that the
    rule reads, and every rule reads those of `COMMON_OPTIONS`."""

    validation_fraction = setting(
        0.15, "share of a training client's samples kept for validation", "[0, 1)"
    )
    test_fraction = setting(
        0.0,
        "share of a client's samples kept for test, where the rule divides no test set",
        "[0, 1)",
    )
    test_shift = setting(
        "none",
        "distribution shift applied to training clients' test sets (FedTHE)",
        ("none", "corruption", "out-of-client", "natural", "mixture"),
    )
    labeled_clients = setting(
        1.0, "share of the training clients that have labels; the seed decides which", "(0, 1]"
    )
    public_samples = setting(
        0,
        "samples that nobody owns; 0: for methods that need some 5000, or a sixth of the data",
        "[0, 1000000000]",
    )
    classes_per_client = setting(2, "at most so many classes a client", POSITIVE_INT)
    equal_sizes = setting(
        True, "clients of one size, some samples nobody's; false: all samples are dealt"
    )
    shards_per_client = setting(2, "shards of label-sorted samples a client", POSITIVE_INT)
    alpha = setting(0.1, "concentration for training clients", "(0, 1000000]")
    novel_alpha = setting(0.0, "concentration for novel clients; 0: the same", NONNEGATIVE)
    major_classes = setting(2, "major classes of a client; one may occur twice", "[1, 4]")
    ratio = setting(16.0, "samples of a major class for one of another class", "[1, 1000000]")
    samples_per_client = setting(0, "samples of a client; 0: as many as the data give", COUNT)
    column = setting("", "column whose values are the clients; empty: the dataset's first")
    min_samples = setting(2, "values with fewer samples are left out", POSITIVE_INT)
    samples = setting(1000, "samples of all clients together", "[1, 1000000000]")
    class_shards = setting(0, "shards of one class that a client gets; 0: IID", COUNT)
    interpolation = setting("bilinear", "of rotated pixels", ("bilinear", "bicubic"))
    angles = setting("0,30,60", "degrees counterclockwise, training clients", listed=True)
    novel_angles = setting("15,45", "degrees counterclockwise, novel clients", listed=True)
    base_rule = setting("pathological", "the rule that deals", tuple(BASES))
    blur = setting(0.0, "deviation of the Gaussian in pixels", "[0, 1000]")
    rotation = setting(0.0, "degrees counterclockwise", "[-360, 360]")
    keep_fraction = setting(1.0, "share that a novel client keeps", "(0, 1]")
    corruptions = setting(
        "",
        "training clients: each has one of these; see partitions/shifts/corruptions.py",
        listed=True,
    )
    novel_corruptions = setting(
        "", "novel clients: the same, of others; none among them leaves clients clean", listed=True
    )
    severity = setting(0, "of the corruptions, 1 to 5; 0: drawn for each client", "[0, 5]")
    corruption_every = setting(
        0, "samples after which a novel client's corruption changes; 0: never", COUNT
    )
    permuted_labels = setting(False, "novel clients label by a permutation of the classes")
    shares = setting("", 'shares of the sub-populations, as "0.7,0.3"; empty: equal', listed=True)
    samples_per_user = setting(30, "half of them positive", "[2, 1000000]")
    validation_per_user = setting(0, "how many of them only validate; 0: none", COUNT)
    test_per_user = setting(10, "how many of them only test", COUNT)
    novel_dataset = setting("stl10", "the novel clients' dataset")


CORRUPTED = ("corruptions", "novel-corruptions")
COMMON_OPTIONS = (  # options of all rules
    "validation-fraction",
    "test-fraction",
    "test-shift",
    "labeled-clients",
    "public-samples",
    *CORRUPTED,
    "severity",
    "corruption-every",
    "permuted-labels",
)


def options_of(config: Config) -> set[str]:
    """The names of the options that the configured rule and its base read; of a rule from outside,
    which may read any, all names."""
    rule = RULES.get(str(config["partition"]))
    if rule is None:
        return set(map(key_of, Options.declared))
    base = (
        RULES.get(str(config.get("partition.base-rule"))) if "base-rule" in rule.options else None
    )
    return {*COMMON_OPTIONS, *rule.options, *(base.options if base else ())}


def _adopted(name: str, rule: Any) -> Partition:
    """``module:NAME``: a `Partition`, or what makes a Partitioner, such as flwr-datasets' own."""
    if isinstance(rule, Partition):
        return rule
    from flwr_datasets.partitioner import Partitioner

    if not external_code.declares_return_type(rule, Partitioner):
        raise ValueError(
            f"{name!r} is {rule!r:.200}; a partition must be a subclass of flwr-datasets' "
            "Partitioner, or a function annotated to return one (-> Partitioner)"
        )

    def make(config: Config, novel: np.ndarray) -> Any:
        given = _given(config, novel)
        return external_code.call_with(name, rule, given, external_code.options(config, name))

    return Partition(make, f"{rule.__doc__ or name}".partition("\n")[0])


PARTITIONS = external_code.Registry("partition", RULES, _adopted)
