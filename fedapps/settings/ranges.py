"""What values the keys of the configuration may have.

A key that a class reads has its range where the class declares it, see `partitions.settings`; here
stand the ranges of a run's own keys. What depends on several keys, or on the data, is checked where
both are known."""

from dataclasses import replace

from clients.base import Client
from clients.privacy import COVERS, GENERATORS
from fedapps.methods import METHODS
from partitions.base import STANDARDIZE
from partitions.settings import COUNT, ROUNDS, SECONDS, SOME, WEIGHT, Setting, Value
from strategies.fedavg import FedAvg
from strategies.privacy import MODES

INTERVALS = {
    "num-clients": SOME,
    "train-fraction": "(0, 1]",
    "rounds": ROUNDS,
    "novel-rounds": ROUNDS,
    "novel-shots": COUNT,
    "early-stopping": ROUNDS,
    "checkpoint-every": ROUNDS,
    "cohort": "[1, 10000]",
    "image-size": "[0, 4096]",
    "serve-every": "(0, 86400]",
    "serve-timeout": "(0, 86400]",
    "data-seed": "[-1, 9223372036854775807]",
    "round-timeout": SECONDS,
    "dp-clip": "(0, 1000000]",
    "dp-noise-multiplier": WEIGHT,
    "dp-epsilon": WEIGHT,
    "dp-delta": "(0, 1)",
    "partition.validation-fraction": "[0, 1)",
    "partition.test-fraction": "[0, 1)",
    "partition.public-samples": "[0, 1000000000]",
    "partition.classes-per-client": SOME,
    "partition.shards-per-client": SOME,
    "partition.alpha": "(0, 1000000]",
    "partition.novel-alpha": WEIGHT,
    "partition.min-samples": SOME,
    "partition.samples": "[1, 1000000000]",
    "partition.blur": "[0, 1000]",
    "partition.rotation": "[-360, 360]",
    "partition.keep-fraction": "(0, 1]",
    "partition.samples-per-user": "[2, 1000000]",
    "partition.test-per-user": COUNT,
    "partition.validation-per-user": COUNT,
}
CHOSEN: dict[str, tuple[str, ...]] = {
    "dp": tuple(MODES),
    "dp-generator": tuple(GENERATORS),
    "dp-covers": tuple(COVERS),
    "standardize": tuple(STANDARDIZE),
}


def declared(key: str, default: Value) -> Setting:
    """The setting of a key: as the method's classes declare it, or those of every method.

    Keys of somebody else's code take any value of the default's type."""
    section, _, name = key.rpartition(".")
    attribute = name.replace("-", "_")
    classes = (METHODS[section].strategy, METHODS[section].client) if section in METHODS else ()
    for cls in (*classes, *(() if section and not classes else (FedAvg, Client))):
        if attribute in cls.declared:
            return cls.declared[attribute]
    return Setting(default, "", CHOSEN.get(key) or INTERVALS.get(key, ""))


def check(key: str, value: Value, default: Value) -> Value:
    """`value` in the type of the default. Raises ValueError, naming the value and the range or the
    choices, if it is none or out of range."""
    return replace(declared(key, default), default=default).checked(key, value)
