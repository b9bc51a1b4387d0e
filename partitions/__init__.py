"""Which samples belong to which client.

`from fedapps.partitions import setting` works for the names that a method's author needs."""

from collections.abc import Callable
from functools import cache, lru_cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from fedapps.common.lazy import lazy

if TYPE_CHECKING:
    from partitions.datasets.loading import Info
    from partitions.federations import Federation
    from partitions.rules.registry import Config

# The keys outside of "partition.…" and of references' options on which a federation depends.
KEYS = (
    "dataset",
    "data-dir",
    "image-size",
    "label",
    "task",
    "inputs",
    "partition",
    "num-clients",
    "train-fraction",
    "standardize",
    "missing",
    "skip-broken",
    "columns",
    "ignore",
    "seed",
    "novel-shots",
)
_MODULES = {
    "Info": "partitions.datasets.loading",
    "NONNEGATIVE": "fedapps.common.settings",
    "Raw": "partitions.datasets.readers.raw",
    "RowsPartitioner": "partitions.rules.partitioner",
    "WEIGHT": "fedapps.common.settings",  # the former name of NONNEGATIVE, for one release
    "setting": "fedapps.common.settings",
}
__all__ = [*sorted(_MODULES), "federation", "learns_from_inputs", "task"]  # noqa: PLE0604
__getattr__ = lazy(__name__, _MODULES)
RUN_SEED = -1  # value of data-seed that means the run's seed
FEDERATIONS = {  # rules that need a subclass of Federation
    "preference": "partitions.preference_federation:PreferenceFederation",
    "cross-dataset": "partitions.cross_federation:CrossFederation",
}


# Functions that clear caches of other modules; called when this process forgets its federations.
forgetting: list[Callable[[], None]] = []


def federation(config: "Config") -> "Federation":
    """The federation that `config` describes: one object per process for equal settings.

    ``data-seed`` is its seed, so that runs of several seeds can share one split; -1: ``seed``."""
    relevant = {key: config[key] for key in _relevant(tuple(config))}
    data_seed = int(config["data-seed"])
    if data_seed < RUN_SEED:
        raise ValueError(f"data-seed is {data_seed}; it must be at least 0, or -1 for the seed")
    if data_seed != RUN_SEED:
        relevant["seed"] = data_seed
    return _federation(tuple(relevant.items()))


@lru_cache(maxsize=8)
def _relevant(keys: tuple[str, ...]) -> list[str]:
    """The keys that a federation depends on."""
    return sorted(key for key in keys if key in KEYS or key.startswith("partition.") or ":" in key)


def learns_from_inputs(config: "Config") -> bool:
    """Whether preprocessing depends on the training clients' inputs: their moments, or a table's
    columns."""
    from partitions.datasets.description import BY_TRAINING, TABLE, scaling
    from partitions.datasets.loading import described

    inputs = described(config).inputs
    is_table = inputs is not None and inputs.kind == TABLE
    return is_table or scaling(config, inputs) == BY_TRAINING


def learns_words(config: "Config") -> bool:
    """Whether the tokens depend on the words that training clients use most."""
    from partitions.datasets.loading import described

    return described(config).clients_words


def forget_changed() -> None:
    """Forget the federations of this process if files of their data have changed."""
    from partitions.datasets.loading import forget_changed as forget_data

    if forget_data():
        _federation.cache_clear()
        for forget in forgetting:
            forget()


def task(config: "Config") -> "Info":
    """What the network predicts: the dataset's classes, or users' preferences."""
    from partitions.datasets.description import TABLE
    from partitions.datasets.loading import described, preference_info

    info = described(config)
    if config["partition"] == "preference":
        return preference_info(info)
    if info.inputs is not None and info.inputs.kind == TABLE:
        return federation(config).info  # its training clients decide which columns a network gets
    return info


@cache
def _federation(items: tuple[tuple[str, str | int | float | bool], ...]) -> "Federation":
    config = dict(items)
    class_name = FEDERATIONS.get(str(config["partition"]), "partitions.federations:Federation")
    new_federation: Federation = resolve_name(class_name)(config)
    return new_federation
