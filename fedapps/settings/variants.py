"""Variants: methods with settings of their own, whose label names a run and its folder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from fedapps.common.external_code import Value, is_reference
from fedapps.common.settings import present_key
from fedapps.methods import METHODS
from fedapps.settings.overrides import Config, is_method, override, parse_override
from partitions.datasets.catalog import DATASETS
from partitions.rules.registry import RULES, options_of

# Only evaluations depend on these settings.
EVALUATIONS = (
    "novel-shots", "novel-steps", "novel-lr", "novel-batch", "novel-stream", "partition.test-shift",
)  # fmt: skip
# Settings of the app that the commands set, each with what to use instead.
OF_THE_APP = {"output-dir": "--output", "resume": "--resume or --fresh"} | dict.fromkeys(
    ("serve-dir", "serve-every", "serve-again", "serve-round", "serving"), "fedapps serve"
)
OF_OWN_DATA = ("image-size", "label")  # settings that the package's datasets do not read


def is_of_data(key: str) -> bool:
    """Whether a setting decides who holds which samples, or is an option of the user's own dataset
    or network."""
    from partitions.federations import PARTITION_KEYS

    section = key.rpartition(".")[0]
    own = is_reference(section) and not is_method(section)
    return own or section == "partition" or key in (*PARTITION_KEYS, "dataset", "data-seed")


@dataclass(frozen=True)
class Variant:
    """A method with settings of its own, as ``"fedembed assignment=som lr=0.01"`` says it."""

    method: str
    words: tuple[str, ...] = ()  # key=value, as they were written: they name the folder

    @classmethod
    def parse(cls, label: str) -> "Variant":
        """From its label. Raises ValueError for a "/", since the label names a folder."""
        if "/" in label:
            raise ValueError(f"{label!r} cannot name a folder; set what has a / for all methods")
        method, *words = label.split() or [""]
        return cls(method, tuple(words))

    @classmethod
    def of_folder(cls, folder: Path, method: str) -> "Variant":
        """The variant that the name of a run's folder tells, the `method` itself if none."""
        found = cls.parse(folder.name.rpartition("-seed")[0].replace(",", " "))
        return found if found.words and found.method == method else cls(method)

    def __str__(self) -> str:
        return " ".join([self.method, *self.words])

    @property
    def settings(self) -> dict[str, Value]:
        """Its settings as they are written, a method's own ones without the section."""
        return dict(map(parse_override, self.words))

    def folder(self, seed: Value) -> str:
        """Folder of its run, ``fedembed,assignment=som-seed0``."""
        return f"{','.join([self.method, *self.words])}-seed{seed}"

    def former(self, folder: Path, seed: Value) -> str:
        """Name of the run in `folder` that it starts from: its own, else that of the same variant
        with other `EVALUATIONS`, which do not change what was trained, else FedAvg's on the same
        data, else FedAvg's."""
        words = tuple(word for word in self.words if word.partition("=")[0] not in EVALUATIONS)
        data = tuple(word for word in words if is_of_data(word.partition("=")[0]))
        fedavg = Variant("fedavg", data), Variant("fedavg")
        candidates = (self, Variant(self.method, words), *fedavg)
        names = [variant.folder(seed) for variant in candidates]
        return next((name for name in names if (folder / name).is_dir()), names[1])

    def apply(self, config: Mapping[str, Value]) -> Config:
        """`config` for this variant. A key is the method's where it has one of that name, a common
        one otherwise. Raises ValueError for unknown methods and keys, for wrong values, and for
        keys that are set twice or that are not the method's to set."""
        changes: dict[str, Any] = {"method": METHODS.check(self.method)}
        config, keys = override(config, changes), [word.partition("=")[0] for word in self.words]
        for key, value in self.settings.items():
            section = key.rpartition(".")[0]
            if keys.count(key) > 1:
                raise ValueError(f"{str(self)!r} sets {key} twice; leave one out")
            if key in ("method", "seed", *OF_THE_APP):
                raise ValueError(f"{str(self)!r}: {key} is no setting of a single method")
            if section in METHODS.known() and section not in (
                self.method,
                *ancestors(self.method),
            ):
                raise ValueError(f"{str(self)!r}: {self.method} does not read {key}")
            own = present_key(f"{self.method}.{key}")
            changes[key if key in config and own not in config else own] = value
        return override(config, changes)


def combinations(methods: Sequence[str], grid: Mapping[str, Sequence[Value]]) -> list[str]:
    """Every method with every combination of the grid's values: ``"tent lr=0.1 rounds=5"``.

    A key of a method's own section spans that method's runs alone. Raises ValueError for a key
    that spans nothing or that a method's label sets already, and for values that cannot stand in
    a folder's name."""
    for key, values in grid.items():
        if not values:
            raise ValueError(f"{key} is [], an empty list; give it at least one value")
        if bad := [value for value in values if set(_word(value)) & set(" ,/=") or value == ""]:
            raise ValueError(f"{key}={bad[0]!r} cannot name a folder; run it by itself")
    labels, spanning = [], set()
    for label in methods:
        variant = Variant.parse(label)
        spanned = [
            key
            for key in grid
            if (section := key.rpartition(".")[0]) in ("partition", "", variant.method)
            or (is_reference(section) and not is_method(section))
        ]
        spanning |= set(spanned)
        words = [key.removeprefix(f"{variant.method}.") for key in spanned]
        if twice := variant.settings.keys() & set(words):
            raise ValueError(f"{label!r} sets {min(twice)}, which is swept as well; leave one out")
        for values in product(*(grid[key] for key in spanned)):
            pairs = zip(words, values, strict=True)
            labels.append(" ".join([label, *(f"{word}={_word(value)}" for word, value in pairs)]))
    if idle := sorted(grid.keys() - spanning):
        raise ValueError(f"{idle[0]} is swept, but no such method runs: {', '.join(methods)}")
    return list(dict.fromkeys(labels))


def _word(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_shadowed(
    config: Mapping[str, Value],
    changes: Mapping[str, Any],
    methods: Sequence[str],
    from_file: Collection[str] = (),
) -> list[str]:
    """A sentence for each of the `changes`, which `config` has, that some of the `methods` do not
    follow: their own sections set the key, their partition rule does not read it, or no such
    method runs.

    Raises ValueError for a common setting, or an option of the partition, that changes nothing for
    any of them, naming what does. A change that is `from_file` may be meant for methods that do not
    run now."""
    variants = [Variant.parse(method) for method in methods]
    notes = _unread_options(config, changes, variants, from_file)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        reached = [v for v in variants if section in ("", v.method, *ancestors(v.method))]
        said = {k for k in changes if k not in from_file or key in from_file}
        own = [v.method for v in reached if _sets(config, said, v, section, name, value)]
        if not own:
            if not reached and section in METHODS.known() and key not in from_file:
                notes.append(f"{key}={value} changes nothing here: {section} does not run")
            continue
        instead = ", ".join(dict.fromkeys(f"{method}.{name}={value}" for method in own))
        if len(own) == len(reached) and key not in from_file:
            raise ValueError(f"{key}={value} changes nothing here; instead: {instead}")
        notes.append(
            f"{key}={value} does not change {', '.join(dict.fromkeys(own))}; for that: {instead}"
        )
    return notes


def _unread_options(
    config: Mapping[str, Value],
    changes: Mapping[str, Any],
    variants: Sequence[Variant],
    from_file: Collection[str],
) -> list[str]:
    """The same for options of the partition and of a user's own data, also those that the variants
    set."""
    notes = []
    for key in dict.fromkeys([*changes, *(key for v in variants for key in v.settings)]):
        configs = [
            {**config, **v.settings} for v in variants if key in changes or key in v.settings
        ]
        unread = [c for c in configs if not _is_read(key, c)]
        if not unread:
            continue
        if key in OF_OWN_DATA:
            source, readers = "dataset", "with your own images or tables"
            names = [name for c in unread for name in _datasets(c)]
        else:
            able = (n for n, r in RULES.items() if key.removeprefix("partition.") in r.options)
            source, readers = "partition", f"by {', '.join(able)}"
            names = [str(c["partition"]) for c in unread]
        there = ", ".join(dict.fromkeys(names))
        said = f"{key}={changes[key]}" if key in changes else key
        if key not in from_file and len(unread) == len(configs):
            raise ValueError(
                f"{said} changes nothing here, since {source} is {there}; it is read {readers}"
            )
        notes.append(f"{said} changes nothing where the {source} is {there}")
    return notes


def _is_read(key: str, config: Config) -> bool:
    """Whether the configuration's partition rule or datasets read the key; True for others."""
    if key in OF_OWN_DATA:
        return not DATASETS.keys() >= set(_datasets(config))
    section, _, name = key.rpartition(".")
    return section != "partition" or name in options_of(config)


def _datasets(config: Config) -> list[str]:
    keys = ["dataset", *["partition.novel-dataset"] * ("novel-dataset" in options_of(config))]
    return [str(config[key]) for key in keys]


def _sets(
    config: Mapping[str, Value],
    said: Collection[str],
    variant: Variant,
    section: str,
    name: str,
    value: Any,
) -> bool:
    """Whether a method's section holds another value than the one given for it elsewhere, and is
    not among the keys that the user `said` as well."""
    key = f"{variant.method}.{name}"
    if variant.method == section or key in said or name in variant.settings:
        return False
    return key in config and config[key] != value


@cache
def ancestors(method: str) -> tuple[str, ...]:
    """The method that it extends, the one that this one extends, and so on."""
    parent = METHODS[method].extends
    return (parent, *ancestors(parent)) if parent else ()


def root(method: str) -> str:
    """The method that it extends, in the end; itself if it extends none."""
    return [method, *ancestors(method)][-1]
