"""name → partitioner, with its options (keys ``partition.<option>``)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partitions.datasets import info
from partitions.seeds import seed_of

Config = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Partition:
    """A rule: ``make(config, novel)`` gives flwr-datasets' Partitioner for the roles `novel`,
    bool (num_clients,)."""

    make: Callable[[Config, np.ndarray], Any]
    line: str
    options: tuple[str, ...] = ()


def _iid(config: Config, novel: np.ndarray) -> Any:
    from flwr_datasets.partitioner import IidPartitioner

    return IidPartitioner(len(novel))


def _shards(config: Config, novel: np.ndarray) -> Any:
    from flwr_datasets.partitioner import ShardPartitioner

    count = int(config["partition.shards-per-client"])
    if count < 1:
        raise ValueError(f"partition.shards-per-client is {count}; it must be at least 1")
    return ShardPartitioner(len(novel), "label", num_shards_per_partition=count, seed=_seed(config))


def _pathological(config: Config, novel: np.ndarray) -> Any:
    from partitions.pathological import PathologicalPartitioner

    return PathologicalPartitioner(
        len(novel), int(config["partition.classes-per-client"]), _seed(config)
    )


def _dirichlet(config: Config, novel: np.ndarray) -> Any:
    from partitions.dirichlet import DirichletPartitioner

    alpha = float(config["partition.alpha"])
    novel_alpha = float(config["partition.novel-alpha"])
    alphas = [(novel_alpha or alpha) if one else alpha for one in novel]
    return DirichletPartitioner(alphas, _seed(config))


def _preference(config: Config, novel: np.ndarray) -> Any:
    from partitions.preference import PreferencePartitioner, apportion

    counts = apportion(
        str(config["partition.shares"]), len(novel), info(str(config["dataset"])).num_classes
    )
    seed = seed_of(int(config["seed"]), "sub-populations")
    preferred = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    return PreferencePartitioner(
        preferred.tolist(),
        int(config["partition.samples-per-user"]),
        int(config["partition.test-per-user"]),
        _seed(config),
    )


def _seed(config: Config) -> int:
    return seed_of(int(config["seed"]), "partition") % 2**32  # flwr-datasets wants 32 bits


PARTITIONS = {
    "iid": Partition(_iid, "every client a random sample of equal size"),
    "shards": Partition(
        _shards, "label-sorted shards, some per client (McMahan et al.)", ("shards-per-client",)
    ),
    "pathological": Partition(
        _pathological, "at most some classes a client, equal sizes", ("classes-per-client",)
    ),
    "dirichlet": Partition(
        _dirichlet, "class proportions from a Dirichlet distribution", ("alpha", "novel-alpha")
    ),
    "preference": Partition(
        _preference,
        "users prefer one type each and label by it (FedEmbed)",
        ("shares", "samples-per-user", "test-per-user"),
    ),
}


def partition(name: str) -> Partition:
    """The entry of `name`; ValueError with the choices if there is none."""
    if name not in PARTITIONS:
        raise ValueError(f"unknown partition {name!r}; known: {', '.join(PARTITIONS)}")
    return PARTITIONS[name]
