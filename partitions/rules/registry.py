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
from fedapps.common.settings import (
    COUNT,
    NONNEGATIVE,
    POSITIVE_INT,
    Configured,
    key_of,
    keyword_arguments,
    setting,
)

if TYPE_CHECKING:
    from partitions.shifts.changes import Change

Config = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Partition:
    """A partition rule.

    ``make(config, novel)`` builds flwr-datasets' Partitioner; `novel` is bool (num_clients,).
    ``change(config, novel)`` builds the change that is applied to the clients after partitioning.
    Both raise ValueError for bad options, and neither reads data. A `sparse` rule may leave novel
    clients without samples. One that `needs_classes` reads one class of each sample. A new
    `version` of a rule takes no assignment from the cache that an earlier one made."""

    make: Callable[[Config, np.ndarray], Any]
    summary: str
    options: tuple[str, ...] = ()
    change: "Callable[[Config, np.ndarray], Change] | None" = None
    sparse: bool = False
    needs_classes: bool = False
    version: int = 0


def _make(place: str, config: Config, novel: np.ndarray, **more: Any) -> Any:
    """The Partitioner ``module:NAME``, called with those options that it has as parameters."""
    arguments = _common_arguments(config, novel) | keyword_arguments(config, "partition") | more
    return external_code.call_with(place, resolve_name(place), arguments, {})


def _common_arguments(config: Config, novel: np.ndarray) -> dict[str, Any]:
    """The arguments that every rule may take beside its options."""
    return {
        "num_clients": len(novel),
        "num_partitions": len(novel),  # the name in flwr-datasets
        "partition_by": "label",
        "novel": novel,
        "seed": _seed(config),
    }


def _shards(config: Config, novel: np.ndarray) -> Any:
    shards_per_client = config["partition.shards-per-client"]
    place = "flwr_datasets.partitioner:ShardPartitioner"
    return _make(place, config, novel, num_shards_per_partition=shards_per_client)


def _by_classes(place: str, config: Config, novel: np.ndarray) -> Any:
    from partitions.datasets.loading import described

    info = described(config)
    classes_per_client = int(config["partition.classes-per-client"])
    if classes_per_client > info.num_classes:
        raise ValueError(
            f"partition.classes-per-client is {classes_per_client}, but {info.name} has only "
            f"{info.num_classes} classes"
        )
    return _make(place, config, novel)


def _by_alphas(place: str, config: Config, novel: np.ndarray) -> Any:
    alpha = config["partition.alpha"]
    novel_alpha = config["partition.novel-alpha"] or alpha
    alphas = [novel_alpha if is_novel else alpha for is_novel in novel]
    return _make(place, config, novel, alphas=alphas, novel_alpha=novel_alpha)


def _natural(config: Config, novel: np.ndarray) -> Any:
    from partitions.datasets.loading import described

    info = described(config)
    first_column = next(iter(info.columns), "")
    column = str(config["partition.column"]) or first_column
    if not column:
        raise ValueError(
            f"{info.name} has no natural column to divide it by; partition.column names one"
        )
    return _make("partitions.rules.natural:NaturalPartitioner", config, novel, column=column)


def _base_rule(config: Config, novel: np.ndarray) -> Any:
    return RULES[str(config["partition.base-rule"])].make(config, novel)


def _rotation(config: Config, novel: np.ndarray) -> "Change":
    from partitions.shifts.changes import Rotation

    angles = _angles(config, "partition.angles")
    novel_angles = _angles(config, "partition.novel-angles")
    interpolation = str(config["partition.interpolation"])
    return Rotation(novel, angles, novel_angles, int(config["seed"]), interpolation)


def _angles(config: Config, key: str) -> list[float]:
    try:
        angles = [float(word) for word in str(config[key]).split(",")]
    except ValueError as error:
        raise ValueError(f"{key} is {config[key]!r}; it must list degrees, as 0,30,60") from error
    if not all(map(math.isfinite, angles)):
        raise ValueError(f"{key} is {config[key]!r}; it must list finite degrees")
    return angles


def _mixed(config: Config, novel: np.ndarray) -> Any:
    from partitions.rules.mixed import MixedPartitioner

    return MixedPartitioner(_novel_shifts(config, novel), _seed(config))


def _mixed_shifts(config: Config, novel: np.ndarray) -> "Change":
    from partitions.datasets.loading import described
    from partitions.shifts.corruptions import MixedShifts

    info = described(config)
    severity = int(config["partition.severity"])
    shifts = _novel_shifts(config, novel)
    return MixedShifts(shifts, severity, info.shape, info.scale, int(config["seed"]))


def _novel_shifts(config: Config, novel: np.ndarray) -> list[str]:
    """The shift of each client. Raises ValueError if the option lists none."""
    from partitions.rules.mixed import KEY, shifts_by_client

    names = _names(str(config[KEY]))
    if not names:
        raise ValueError(f"{KEY} is empty; it must list shifts, as none,alpha-0.1,rotation-45")
    return shifts_by_client(names, novel, int(config["seed"]))


def _change(place: str, config: Config, novel: np.ndarray) -> "Change":
    """The `Change` ``module:NAME``, called with those options that it has as parameters."""
    arguments: dict[str, Any] = {"novel": novel, "seed": config["seed"]}
    arguments |= keyword_arguments(config, "partition")
    change: Change = external_code.call_with(place, resolve_name(place), arguments, {})
    return change


def changes(config: Config, novel: np.ndarray) -> "list[Change]":
    """The changes of the clients, in order: the rule's, corruptions, permuted labels."""
    seed = int(config["seed"])
    rule = PARTITIONS[str(config["partition"])]
    all_changes: list[Change] = []
    if rule.change:
        all_changes.append(rule.change(config, novel))
    corruptions = _names(str(config["partition.corruptions"]))
    novel_corruptions = _names(str(config["partition.novel-corruptions"]))
    has_corruptions = bool(corruptions or novel_corruptions)
    permutes_labels = bool(config["partition.permuted-labels"])
    if not has_corruptions and not permutes_labels:
        return all_changes

    # These modules import torch, which most federations do not need for their changes.
    from partitions.datasets.loading import described
    from partitions.shifts.changes import PermutedLabels
    from partitions.shifts.corruptions import UnseenCorruptions

    info = described(config)
    if has_corruptions:
        corruption = UnseenCorruptions(
            novel,
            (corruptions, novel_corruptions),
            int(config["partition.severity"]),
            int(config["partition.corruption-every"]),
            info.shape,
            info.scale,
            seed,
        )
        all_changes.append(corruption)
    if permutes_labels:
        all_changes.append(PermutedLabels(novel, info.num_classes, seed))
    return all_changes


def _names(text: str) -> list[str]:
    """The entries of a comma-separated list, without empty ones."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _preference(config: Config, novel: np.ndarray) -> Any:
    from partitions.datasets.loading import described
    from partitions.rules.preference import PreferencePartitioner, apportion

    num_types = described(config).num_classes
    users_of_type = apportion(str(config["partition.shares"]), len(novel), num_types)
    types = np.repeat(np.arange(num_types), users_of_type)
    generator = np.random.default_rng(seed_of(int(config["seed"]), "sub-populations"))
    return PreferencePartitioner(
        generator.permutation(types).tolist(),
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
        "equally many random samples for every client",
    ),
    "shards": Partition(
        _shards,
        "label-sorted shards, a few for each client (McMahan et al.)",
        ("shards-per-client",),
        needs_classes=True,
    ),
    "pathological": Partition(
        partial(_by_classes, "partitions.rules.pathological:PathologicalPartitioner"),
        "a few classes for each client, equal sizes",
        ("classes-per-client", "equal-sizes"),
        needs_classes=True,
    ),
    "dirichlet": Partition(
        partial(_by_alphas, "partitions.rules.dirichlet:DirichletPartitioner"),
        "class proportions from a Dirichlet distribution",
        ("alpha", "novel-alpha"),
        needs_classes=True,
    ),
    "dirichlet-split": Partition(
        partial(_by_alphas, "partitions.rules.dirichlet_split:SplitDirichletPartitioner"),
        "Dirichlet shares of each class; novel clients hold the test split (FedTTA)",
        ("alpha", "novel-alpha"),
        sparse=True,
        needs_classes=True,
        version=1,
    ),
    "class-fraction": Partition(
        partial(_by_classes, "partitions.rules.class_fraction:ClassFractionPartitioner"),
        "a few classes for each client, random shares of each; test samples alike (pFedHN)",
        ("classes-per-client", "extra-holder"),
        needs_classes=True,
    ),
    "dirichlet-novel": Partition(
        partial(_by_alphas, "partitions.rules.dirichlet:NormalizedDirichletPartitioner"),
        "normalised Dirichlet shares of each class; test samples alike (pFedHN)",
        ("alpha", "novel-alpha"),
        needs_classes=True,
    ),
    "step": Partition(
        partial(_make, "partitions.rules.step:StepPartitioner"),
        "many samples of a client's major classes, few of each other class (ATP)",
        ("major-classes", "ratio", "samples-per-client"),
        needs_classes=True,
    ),
    "coarse": Partition(
        partial(_make, "partitions.rules.coarse:CoarsePartitioner"),
        "one superclass for each client, equally many clients for each superclass (CIFAR-100)",
    ),
    "natural": Partition(
        _natural, "one writer, alphabet, author or place for each client", ("column", "min-samples")
    ),
    "rotated": Partition(
        partial(_make, "partitions.rules.iid:SubsetIidPartitioner"),
        "few samples, all images of a client rotated by one angle (FedTTA)",
        ("samples", "class-shards", "angles", "novel-angles", "interpolation"),
        _rotation,
    ),
    "corrupted": Partition(
        _base_rule,
        "a base rule; novel clients blurred or rotated (ODPFL-HN)",
        ("base-rule", "blur", "rotation"),
        partial(_change, "partitions.shifts.changes:Corruption"),
    ),
    "subsampled": Partition(
        _base_rule,
        "a base rule; novel clients keep a share of their samples (ODPFL-HN)",
        ("base-rule", "keep-fraction"),
        partial(_change, "partitions.shifts.changes:Subsampling"),
    ),
    "mixed": Partition(
        _mixed,
        "all classes alike; each novel client has another shift, of its classes or of its inputs",
        ("novel-shifts",),
        _mixed_shifts,
        needs_classes=True,
    ),
    "cross-dataset": Partition(
        _base_rule,
        "a base rule; novel clients hold another dataset with the same classes (ODPFL-HN)",
        ("base-rule", "novel-dataset"),
    ),
    "preference": Partition(
        _preference,
        "users prefer one type each and label by it (FedEmbed)",
        ("shares", "samples-per-user", "validation-per-user", "test-per-user"),
    ),
}
COMPOSED = ("cross-dataset", "preference")  # rules with a subclass of Federation
BASES = [name for name, rule in RULES.items() if rule.change is None and name not in COMPOSED]


class Options(Configured):
    """The options of the rules, keys ``partition.<option>``.

    A rule reads the options that its row of `RULES` names, and those of `COMMON_OPTIONS`."""

    validation_fraction = setting(
        0.15, "fraction of each training client's samples that is used for validation", "[0, 1)"
    )
    test_fraction = setting(
        0.0,
        "fraction of each client's samples that is used for test, unless the rule partitions the "
        "dataset's test split",
        "[0, 1)",
    )
    test_shift = setting(
        "none",
        "distribution shift applied to training clients' test sets (FedTHE)",
        ("none", "corruption", "out-of-client", "natural", "mixture"),
        evaluation=True,
    )
    labeled_clients = setting(
        1.0, "fraction of the training clients that have labels, drawn by the seed", "(0, 1]"
    )
    public_samples = setting(
        0,
        "size of the public set that no client holds; 0: no public set, or the default of a method "
        "that needs one (5000, at most a sixth of the data)",
        "[0, 1000000000]",
    )
    classes_per_client = setting(2, "maximum number of classes for each client", POSITIVE_INT)
    equal_sizes = setting(
        True,
        "give every client equally many samples, the remainder is unused; false: use all samples",
    )
    extra_holder = setting(
        False,
        "class-fraction: shares of each class as if one client more held it, so that a part of the "
        "samples is unused, as in pFedHN's code; false: use all samples",
    )
    shards_per_client = setting(
        2, "number of shards of label-sorted samples for each client", POSITIVE_INT
    )
    alpha = setting(0.1, "Dirichlet concentration of training clients", "(0, 1000000]")
    novel_alpha = setting(
        0.0, "Dirichlet concentration of novel clients; 0: that of training clients", NONNEGATIVE
    )
    major_classes = setting(
        2, "number of major classes for each client; a class may be drawn twice", "[1, 4]"
    )
    ratio = setting(
        16.0, "samples of a major class for each sample of another class", "[1, 1000000]"
    )
    samples_per_client = setting(
        0, "number of samples for each client; 0: the maximum that the data allow", COUNT
    )
    column = setting("", "column whose values are the clients; empty: the dataset's first column")
    min_samples = setting(2, "leave out values of the column that have fewer samples", POSITIVE_INT)
    samples = setting(1000, "number of samples of all clients together", "[1, 1000000000]")
    class_shards = setting(
        0, "number of shards for each client, every shard of one class; 0: IID", COUNT
    )
    interpolation = setting("bilinear", "interpolation of rotated images", ("bilinear", "bicubic"))
    angles = setting(
        "0,30,60", "rotations of training clients, in degrees counterclockwise", listed=True
    )
    novel_angles = setting(
        "15,45", "rotations of novel clients, in degrees counterclockwise", listed=True
    )
    base_rule = setting(
        "pathological", "the partition rule that this shift is applied to", tuple(BASES)
    )
    blur = setting(
        0.0, "standard deviation of novel clients' Gaussian blur, in pixels", "[0, 1000]"
    )
    rotation = setting(
        0.0, "rotation of novel clients' images, in degrees counterclockwise", "[-360, 360]"
    )
    keep_fraction = setting(1.0, "fraction of its samples that each novel client keeps", "(0, 1]")
    corruptions = setting(
        "",
        "corruptions of training clients, one for each client; see "
        "partitions/shifts/corruptions.py",
        listed=True,
    )
    novel_corruptions = setting(
        "",
        "corruptions of novel clients, which training clients do not have; the entry none means "
        "uncorrupted",
        listed=True,
    )
    severity = setting(0, "severity of the corruptions, 1 to 5; 0: drawn for each client", "[0, 5]")
    corruption_every = setting(
        0, "change a novel client's corruption after this many samples; 0: never", COUNT
    )
    novel_shifts = setting(
        "none,alpha-0.1,rotation-45,inversion",
        "shifts that novel clients have in turn, one each: none, alpha-A for class proportions "
        "from Dir(A), rotation-D for D degrees, or a corruption",
        listed=True,
    )
    permuted_labels = setting(False, "permute the classes of each novel client's labels at random")
    shares = setting(
        "", 'fractions of users in each sub-population, as "0.7,0.3"; empty: equal', listed=True
    )
    samples_per_user = setting(
        30, "number of samples for each user, half of them positive", "[2, 1000000]"
    )
    validation_per_user = setting(
        0, "how many of a user's samples are used for validation; 0: none", COUNT
    )
    test_per_user = setting(10, "how many of a user's samples are used for test", COUNT)
    novel_dataset = setting("stl10", "dataset of the novel clients")


COMMON_OPTIONS = (  # options of all rules
    "validation-fraction",
    "test-fraction",
    "test-shift",
    "labeled-clients",
    "public-samples",
    "corruptions",
    "novel-corruptions",
    "severity",
    "corruption-every",
    "permuted-labels",
)


def options_of(config: Config) -> set[str]:
    """The names of the options that the configured rule and its base rule read.

    A user's rule may read any option, so the result is all names."""
    rule = RULES.get(str(config["partition"]))
    if rule is None:
        return set(map(key_of, Options.declared))
    names = {*COMMON_OPTIONS, *rule.options}
    base_rule = RULES.get(str(config.get("partition.base-rule")))
    if "base-rule" in rule.options and base_rule is not None:
        names.update(base_rule.options)
    return names


def _adopted(name: str, rule: Any) -> Partition:
    """The rule of a user's ``module:NAME``: a `Partition`, or a function or class that makes a
    Partitioner, such as flwr-datasets' own."""
    if isinstance(rule, Partition):
        return rule
    from flwr_datasets.partitioner import Partitioner

    if not external_code.declares_return_type(rule, Partitioner):
        raise ValueError(
            f"{name!r} is {external_code.described(rule)}; a partition must be a subclass of "
            "flwr-datasets' Partitioner, or a function annotated to return one (-> Partitioner)"
        )

    def make(config: Config, novel: np.ndarray) -> Any:
        arguments = _common_arguments(config, novel)
        options = keyword_arguments(config, name)
        return external_code.call_with(name, rule, arguments, options)

    first_line, _, _ = f"{rule.__doc__ or name}".partition("\n")
    return Partition(make, first_line)


PARTITIONS = external_code.Registry("partition", RULES, _adopted)
