"""From a configuration to its federation, and to the task that its networks have."""

from functools import cache, lru_cache

from partitions.cross import CrossFederation
from partitions.datasets import Info, described
from partitions.federation import Federation
from partitions.registry import Config
from partitions.users import PreferenceFederation, preference_info

KEYS = ("dataset", "data-dir", "image-size", "partition", "num-clients", "train-fraction",
        "standardize", "seed", "novel-shots")  # fmt: skip
SAME_SEED = -1  # of data-seed: the run's own
# rules whose federation is of its own kind
OWN = {"preference": PreferenceFederation, "cross-dataset": CrossFederation}


def federation(config: Config) -> Federation:
    """The federation that `config` describes, one object per process for equal settings.

    Its seed is ``data-seed``, so that runs of several seeds can have one split; -1: ``seed``."""
    relevant = {key: config[key] for key in _relevant(tuple(config))}
    data_seed = int(config["data-seed"])
    if data_seed < SAME_SEED:
        raise ValueError(f"data-seed is {data_seed}; it must be at least 0, or -1 for the seed")
    if data_seed != SAME_SEED:
        relevant["seed"] = data_seed
    return _federation(tuple(relevant.items()))


@lru_cache(maxsize=8)
def _relevant(keys: tuple[str, ...]) -> list[str]:
    """Those of the keys that decide what a federation is."""
    return sorted(k for k in keys if k in KEYS or k.startswith("partition.") or ":" in k)


def task(config: Config) -> Info:
    """What the network is to do: the dataset's task, or the one that the partition makes of it."""
    known = described(config)
    return preference_info(known) if config["partition"] == "preference" else known


@cache
def _federation(items: tuple[tuple[str, str | int | float | bool], ...]) -> Federation:
    config = dict(items)
    return OWN.get(str(config["partition"]), Federation)(config)
