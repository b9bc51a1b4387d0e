"""From a configuration to its federation, and to the task that its networks have."""

from functools import cache

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
    relevant = {
        k: v for k, v in config.items() if k in KEYS or k.startswith("partition.") or ":" in k
    }
    data_seed = int(config["data-seed"])
    if data_seed < SAME_SEED:
        raise ValueError(f"data-seed is {data_seed}; it must be at least 0, or -1 for the seed")
    if data_seed != SAME_SEED:
        relevant["seed"] = data_seed
    return _federation(tuple(sorted(relevant.items())))


def task(config: Config) -> Info:
    """What the network is to do: the dataset's task, or the one that the partition makes of it."""
    known = described(config)
    return preference_info(known) if config["partition"] == "preference" else known


@cache
def _federation(items: tuple[tuple[str, str | int | float | bool], ...]) -> Federation:
    config = dict(items)
    return OWN.get(str(config["partition"]), Federation)(config)
