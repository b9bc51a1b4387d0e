"""Variants: methods with settings of their own, whose label names a run and its folder."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from fedapps.common.external_code import Value, is_reference
from fedapps.common.settings import present_key
from fedapps.methods import METHODS
from fedapps.settings.config import (
    Config,
    declared,
    is_method,
    override,
    parse_override,
    section_of,
)

# Settings of the app that the commands set, each with what to use instead.
OF_THE_APP = {
    "output-dir": "--output",
    "resume": "--resume or --fresh",
    "training-dir": "several methods in one command",
} | dict.fromkeys(
    ("serve-dir", "serve-every", "serve-again", "serve-round", "serving"), "fedapps serve"
)
NOT_IN_FOLDER_NAMES = frozenset(" ,/=")


def is_of_data(key: str) -> bool:
    """Whether a setting decides who holds which samples, or is an option of the user's own dataset
    or network."""
    from partitions.federations import PARTITION_KEYS

    section = section_of(key)
    of_own_code = is_reference(section) and not is_method(section)
    if of_own_code or section == "partition":
        return True
    return key in (*PARTITION_KEYS, "dataset", "data-seed")


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
        """The variant in the name of a run's folder. The plain `method` if the name has none."""
        label = folder.name.rpartition("-seed")[0].replace(",", " ")
        variant = cls.parse(label)
        return variant if variant.words and variant.method == method else cls(method)

    def __str__(self) -> str:
        return " ".join([self.method, *self.words])

    @property
    def settings(self) -> dict[str, Value]:
        """Its settings as they are written, a method's own ones without the section."""
        return dict(map(parse_override, self.words))

    def sets(self, name: str) -> bool:
        """Whether its label sets `name`, with or without the method's section."""
        return name in self.settings or f"{self.method}.{name}" in self.settings

    def folder(self, seed: Value) -> str:
        """Folder of its run, ``fedembed,assignment=som-seed0``."""
        return f"{','.join([self.method, *self.words])}-seed{seed}"

    def former(self, folder: Path, seed: Value) -> str:
        """Name of the run in `folder` that it starts from, the first of these that exists: its own
        run, the run that differs in evaluations alone, its method's run on the same data with most
        of its settings, FedAvg's on the same data, FedAvg's, its method's run with most of its
        settings.

        Evaluations do not change what was trained. Raises ValueError if none exists, and if two
        runs have equally many of its settings."""
        words = tuple(word for word in self.words if not self._is_of_evaluations(word))
        data_words = tuple(word for word in words if is_of_data(_key_of(word)))
        with_fewer_words = self._trained_with_fewer_words(folder, seed)
        on_same_data = [
            run for run in with_fewer_words if run.words and set(data_words) <= set(run.words)
        ]
        candidates = [
            [self],
            [Variant(self.method, words)],
            _with_most_words(on_same_data),
            [Variant("fedavg", data_words)],
            [Variant("fedavg")],
            _with_most_words(with_fewer_words),
        ]
        for runs in candidates:
            names = [run.folder(seed) for run in runs]
            present = [name for name in names if (folder / name).is_dir()]
            if len(present) > 1:
                raise ValueError(
                    f"{str(self)!r} can start from {' or '.join(present)}, which have equally many "
                    f"of its settings; name one with --from {folder / present[0]}"
                )
            if present:
                return present[0]
        held = ", ".join(sorted(path.name for path in folder.glob("*-seed*"))) or "none"
        raise ValueError(
            f"{folder} holds no run with seed {seed} for {str(self)!r} to start from; its runs: "
            f"{held:.500}. Name variants and seeds of these with --methods and --seeds, or the "
            "folder of one run with --from"
        )

    def _trained_with_fewer_words(self, folder: Path, seed: Value) -> "list[Variant]":
        """The variants of its method with a run in `folder` that set nothing but what it sets."""
        found = []
        for path in folder.glob(f"{self.method}*-seed{seed}"):
            method, *words = path.name.removesuffix(f"-seed{seed}").split(",")
            if method == self.method and set(words) <= set(self.words):
                found.append(Variant(method, tuple(words)))
        return sorted(found, key=str)

    def _is_of_evaluations(self, word: str) -> bool:
        """Whether evaluations alone depend on the setting in `word`."""
        key = _key_of(word)
        known = declared()
        keys = [f"{name}.{key}" for name in lineage(self.method)]
        return any(known[name].evaluation for name in [*keys, key] if name in known)

    def apply(self, config: Mapping[str, Value]) -> Config:
        """`config` for this variant. A key is the method's where it has one of that name, a common
        one otherwise. Raises ValueError for unknown methods and keys, for wrong values, and for
        keys that are set twice or that are not the method's to set."""
        method_change: dict[str, Any] = {"method": METHODS.check(self.method)}
        config = override(config, method_change)  # adds the section of a method from outside
        self._check_words()
        changes: dict[str, Any] = {}
        for key, value in self.settings.items():
            own_key = present_key(f"{self.method}.{key}")
            is_common = key in config and own_key not in config
            changes[key if is_common else own_key] = value
        return override(config, changes, all_methods=False)

    def _check_words(self) -> None:
        """Raise ValueError for keys that are set twice or that no single method sets."""
        keys = [_key_of(word) for word in self.words]
        for key in self.settings:
            section = section_of(key)
            if keys.count(key) > 1:
                raise ValueError(f"{str(self)!r} sets {key} twice; leave one out")
            if key in ("method", "seed", *OF_THE_APP):
                raise ValueError(f"{str(self)!r}: {key} is no setting of a single method")
            if section in METHODS.known() and section not in lineage(self.method):
                raise ValueError(f"{str(self)!r}: {self.method} does not read {key}")


def _with_most_words(variants: Sequence[Variant]) -> list[Variant]:
    """Those of the variants whose labels set most."""
    most = max((len(variant.words) for variant in variants), default=0)
    return [variant for variant in variants if len(variant.words) == most]


def combinations(
    methods: Sequence[str], grid: Mapping[str, Sequence[Value]], settings: Collection[str] = ()
) -> list[str]:
    """Every method with every combination of the grid's values: ``"tent lr=0.1 rounds=5"``.

    A key of a method's own section spans that method's runs alone. A common key spans no method
    that has a value of its own: in its label, in its section of the grid, or in the keys
    `settings`. Raises ValueError for a key that spans nothing, and for values that cannot stand in
    a folder's name."""
    _check_grid(grid)
    variants = [Variant.parse(label) for label in methods]
    for key in sorted(grid):
        _check_swept(key, variants)
    labels = []
    for variant in variants:
        keys = spanning(variant, grid, settings)
        words = [key.removeprefix(f"{variant.method}.") for key in keys]
        for values in product(*(grid[key] for key in keys)):
            pairs = [f"{word}={_text(v)}" for word, v in zip(words, values, strict=True)]
            labels.append(" ".join([str(variant), *pairs]))
    return list(dict.fromkeys(labels))


def spanning(variant: Variant, swept: Iterable[str], settings: Collection[str] = ()) -> list[str]:
    """The `swept` keys whose values the variant's runs try. A more specific value wins: that of the
    variant's label, or one of the method's section among `swept` or `settings`."""
    swept = list(swept)
    specific = {*swept, *settings}
    inherited = [f"{method}." for method in lineage(variant.method)]
    keys = []
    for key in swept:
        if not _may_sweep(key, variant):
            continue
        is_common = not section_of(key)
        if is_common and any(prefix + key in specific for prefix in inherited):
            continue
        keys.append(key)
    return keys


def _may_sweep(key: str, variant: Variant) -> bool:
    """Whether a swept key is for the variant's method, and its label does not set it."""
    section = section_of(key)
    of_own_code = is_reference(section) and not is_method(section)
    if section not in ("", "partition", variant.method) and not of_own_code:
        return False
    return not variant.sets(key.removeprefix(f"{variant.method}."))


def _check_grid(grid: Mapping[str, Sequence[Value]]) -> None:
    """Raise ValueError for an empty list, and for values that cannot stand in a folder's name."""
    for key, values in grid.items():
        if not values:
            raise ValueError(f"{key} is [], an empty list; give it at least one value")
        for value in values:
            if value == "" or NOT_IN_FOLDER_NAMES & set(_text(value)):
                raise ValueError(f"{key}={value!r} cannot name a folder; run it by itself")


def _check_swept(key: str, variants: Sequence[Variant]) -> None:
    """Raise ValueError for a swept key that no method tries."""
    if any(_may_sweep(key, variant) for variant in variants):
        return
    name = key.rpartition(".")[2]
    for variant in variants:
        if variant.sets(key) or (section_of(key) == variant.method and variant.sets(name)):
            raise ValueError(f"{str(variant)!r} sets {name}, which is swept as well; leave one out")
    labels = ", ".join(map(str, variants))
    raise ValueError(f"{key} is swept, but no such method runs: {labels}")


def _text(value: Value) -> str:
    """A value as a label has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _key_of(word: str) -> str:
    return word.partition("=")[0]


@cache
def ancestors(method: str) -> tuple[str, ...]:
    """The method that it extends, then the method that this one extends, and so on."""
    parent = METHODS[method].extends
    return (parent, *ancestors(parent)) if parent else ()


def lineage(method: str) -> tuple[str, ...]:
    """The method and its `ancestors`."""
    return (method, *ancestors(method))


def root(method: str) -> str:
    """The method at the end of its `ancestors`; itself if it extends none."""
    return lineage(method)[-1]
