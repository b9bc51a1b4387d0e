"""Configuration: the defaults of pyproject, overrides, and their way to constructors."""

import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from flwr.common.config import flatten_dict

from fedapps.methods import METHODS, Method
from fedapps.settings import ranges
from partitions import references, trust
from partitions.references import Value, is_reference
from partitions.settings import taken

Config = dict[str, Value]
NAMING = ("method", "model", "client-models", "dataset", "partition", "novel-dataset")


def project_dir() -> Path:
    """The folder that holds the Flower app's pyproject.toml: a checkout or the installed copy."""
    for folder in (Path(__file__).parents[2], Path(__file__).parents[1]):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise FileNotFoundError("the package has lost its pyproject.toml; reinstall fedapps")


@cache
def _declared() -> Config:
    with (project_dir() / "pyproject.toml").open("rb") as file:
        return dict(flatten_dict(tomllib.load(file)["tool"]["flwr"]["app"]["config"]))


def defaults() -> Config:
    """Every key with its default, flat: ``{"lr": 0.1, "tent.adapt-steps": 10, …}``."""
    return dict(_declared())


def override(config: Mapping[str, Value], changes: Mapping[str, Any]) -> Config:
    """`config` with `changes`, checked: unknown keys, wrong types and values out of range raise
    ValueError."""
    result = _with_own(config, changes)
    for key, value in changes.items():
        if key not in result:
            raise ValueError(_unknown(key, result))
        if type(value) is type(result[key]) and value == result[key]:
            continue
        listed = key in LISTS and type(value) in (int, float)  # a list of one number
        result[key] = ranges.check(key, str(value) if listed else value, result[key])
    return result


def _unknown(key: str, config: Config) -> str:
    """What to say of a key that `config` lacks: the nearest, those beside it, or all sections."""
    section = key.rpartition(".")[0]
    known = sorted(k for k in config if k.rpartition(".")[0] == section)
    near = get_close_matches(key, config, n=1, cutoff=0.8)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    if known:
        return f"unknown key {key!r}{meant}; known: {', '.join(known)}"
    sections = sorted({k.rpartition(".")[0] for k in config} - {""})
    return f"unknown key {key!r}{meant}; no settings of {section!r}, but of {', '.join(sections)}"


def completed(run_config: Mapping[str, Value], *, trusted: bool = False) -> Config:
    """A run's configuration with the defaults of what its app does not declare; errors as
    `override`. What a `trusted` one names is allowed. Asked for every message, so the last ones
    are kept."""
    for asked, found in [*_completed]:
        if asked == run_config:
            return dict(found)
    if trusted:
        trust.allow(*trust.named(run_config))
    found = override(defaults(), run_config)
    _completed.appendleft((dict(run_config), found))
    return dict(found)


_completed: deque[tuple[Config, Config]] = deque(maxlen=8)  # run configurations, and completed ones


def _with_own(config: Mapping[str, Value], changes: Mapping[str, Any]) -> Config:
    """`config` with the settings of whatever it or `changes` refer to outside the package."""
    result = dict(config)
    for one in (config, changes):
        named = [
            word.strip()
            for key, value in one.items()
            if isinstance(value, str) and ":" in value and key.rpartition(".")[2] in NAMING
            for word in value.split(",")
        ]
        named += [key.rpartition(".")[0] for key in one if ":" in key]
        for reference in dict.fromkeys(filter(is_reference, named)):
            for key, default in own_settings(reference).items():
                result.setdefault(f"{reference}.{key}", default)
    return result


def own_settings(reference: str) -> Config:
    """The settings that ``module:NAME`` declares, with their defaults.

    Of a method: what its classes declare beyond the common keys, and its `settings`; of anything
    else: what the function takes by keyword. Raises ValueError for one that nobody reads."""
    found = references.load(reference)
    if not isinstance(found, Method):
        function = getattr(found, "build", found)
        return references.declared(function) if callable(function) else {}
    read = {
        name.replace("_", "-"): one.default
        for name, one in (dict(found.client.declared) | dict(found.strategy.declared)).items()
    }
    common = {key: value for key, value in _declared().items() if "." not in key}
    for key in found.settings.keys() - read.keys() - common.keys():
        raise ValueError(f"{reference} sets {key!r}, which its classes do not declare: {[*read]}")
    own = {key: value for key, value in read.items() if common.get(key) != value}
    return own | dict(found.settings)


def variant(config: Mapping[str, Value], label: str) -> Config:
    """`config` for a method with settings of its own: ``"fedembed assignment=som lr=0.01"``.

    A key is the method's where it has one of that name, a common one otherwise. Raises ValueError
    for unknown methods and keys, wrong types, and a "/", since the label names a folder."""
    if "/" in label:
        raise ValueError(f"{label!r} cannot name a folder; set what has a / for all methods")
    method, *words = label.split()
    changes: dict[str, Any] = {"method": check_method(method)}
    config = override(config, changes)
    for key, value in map(parse_override, words):
        own = f"{method}.{key}"
        changes[key if key in config and own not in config else own] = value
    return override(config, changes)


def folder_name(label: str, seed: Value) -> str:
    """Folder of a variant's run, ``fedembed,assignment=som-seed0``."""
    return f"{','.join(label.split())}-seed{seed}"


def label_of(folder: Path, method: str) -> str:
    """The variant that the name of a run's folder tells, the `method` itself if none."""
    label = folder.name.rpartition("-seed")[0].replace(",", " ")
    return label if label.startswith(f"{method} ") else method


def experiments() -> dict[str, Path]:
    """The shipped experiments, ``<paper>/<table>`` → file."""
    root = Path(__file__).parents[2] / "experiments"
    return {str(f.relative_to(root).with_suffix("")): f for f in sorted(root.rglob("*.toml"))}


@dataclass(frozen=True)
class Experiment:
    """What an experiment's file, or a command line, asks for; nothing of it is checked yet."""

    settings: dict[str, Any] = field(default_factory=dict)  # flat keys with one value
    grid: dict[str, list[Value]] = field(default_factory=dict)  # flat keys with several
    methods: str = ""  # separated by commas, as the seeds are
    seeds: str = ""
    published: Any = None  # its [published] tables, see `fedapps.results.published`
    search: Any = None  # its [search] table, see `fedapps.tuning`
    source: str = ""  # the file's text

    def __or__(self, other: "Experiment") -> "Experiment":
        """This one with what `other` says instead."""
        rest = {key: values for key, values in self.grid.items() if key not in other.settings}
        return Experiment(
            {k: v for k, v in self.settings.items() if k not in other.grid} | other.settings,
            rest | other.grid,
            other.methods or self.methods,
            other.seeds or self.seeds,
            other.published or self.published,
            other.search or self.search,
            other.source or self.source,
        )

    def allow(self) -> None:
        """Let references be imported: a person asked for this, and it is no saved run's."""
        trust.allow(*trust.named([self.settings, self.grid, self.methods, self.search]))


def read_experiment(name: str) -> Experiment:
    """An experiment's file; a list of values spans a grid.

    `name` is a file, or a shipped experiment such as ``fedtta/table1-mnist.toml``."""
    shipped = experiments()
    path = Path(name) if Path(name).is_file() else shipped.get(name.removesuffix(".toml"))
    if path is None:
        raise ValueError(f"no file {name}; shipped experiments: {', '.join(shipped) or 'none'}")
    try:
        text = path.read_text("utf-8")
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid TOML: {error}") from error
    methods, seeds = _lists(content)
    tables = {key: content.pop(key, None) for key in ("published", "search")}
    return replace(_spanned(_flat(content), methods, seeds), **tables, source=text)


def parse_experiment(arguments: Sequence[str]) -> Experiment:
    """The same from ``key=value`` arguments; ``lr=0.01,0.1`` spans a grid.

    Quoted, or where a setting is itself a list, a text with commas is one value."""
    named: dict[str, Any] = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        words = [argument]
        if key not in LISTS and "," in text and not text.startswith(('"', "'")):
            words = [f"{key}={word.strip()}" for word in text.split(",")]
        values = [parse_override(word)[1] for word in words]
        named[key] = values[0] if len(values) == 1 else values
    methods, seeds = _lists(named)
    return _spanned(named, methods, seeds)


def _lists(named: dict[str, Any]) -> tuple[str, str]:
    """Methods and seeds, taken out of `named`, where a single one may stand in the singular."""
    for one, several in (("method", "methods"), ("seed", "seeds")):
        if one in named and several in named:
            raise ValueError(f"there is {one} and there are {several}; leave one of the two")
    return (
        _listed("methods", named.pop("methods", named.pop("method", None))),
        _listed("seeds", named.pop("seeds", named.pop("seed", None))),
    )


def _listed(key: str, value: Any) -> str:
    """A list of names or numbers, separated by commas; "" if there is none.

    Raises ValueError for one without entries, and for other things than texts and numbers."""
    if value is None:
        return ""
    names = value if isinstance(value, list) else [value]
    text = ",".join(map(str, names)) if all(type(one) in (str, int) for one in names) else ""
    if not text.strip(", "):
        raise ValueError(f"{key} is {value!r:.200}; it must be a name, a number, or a list of some")
    return text


LISTS = {  # settings whose text is a list
    "method",
    "methods",
    "callbacks",
    "client-models",
    "partition.angles",
    "partition.novel-angles",
    "partition.shares",
}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A TOML table with dotted keys, as Flower's `flatten_dict`, which refuses lists."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return flat


def _spanned(named: dict[str, Any], methods: str, seeds: str) -> Experiment:
    grid = {key: value for key, value in named.items() if isinstance(value, list)}
    single = {key: value for key, value in named.items() if key not in grid}
    return Experiment(single, grid, methods, seeds)


def combinations(methods: Sequence[str], grid: Mapping[str, Sequence[Value]]) -> list[str]:
    """Every method with every combination of the grid's values: ``"tent lr=0.1 rounds=5"``.

    A key of a method's own section spans that method's runs alone. Raises ValueError for a key
    that spans nothing or that a method's label sets already, and for values that cannot stand in
    a folder's name."""
    for key, values in grid.items():
        if bad := [value for value in values if set(_word(value)) & set(" ,/=") or value == ""]:
            raise ValueError(f"{key}={bad[0]!r} cannot name a folder; run it by itself")
    labels, spanning = [], set()
    for label in methods:
        method, *own = label.split()
        spanned = [
            key
            for key in grid
            if (section := key.rpartition(".")[0]) in ("partition", "", method)
            or (is_reference(section) and not isinstance(references.load(section), Method))
        ]
        spanning |= set(spanned)
        words = [key.removeprefix(f"{method}.") for key in spanned]
        if twice := {word.partition("=")[0] for word in own} & set(words):
            raise ValueError(f"{label!r} sets {min(twice)}, which is swept as well; leave one out")
        for values in product(*(grid[key] for key in spanned)):
            pairs = zip(words, values, strict=True)
            labels.append(" ".join([label, *(f"{word}={_word(value)}" for word, value in pairs)]))
    if idle := sorted(grid.keys() - spanning):
        raise ValueError(f"{idle[0]} is swept, but no such method runs: {', '.join(methods)}")
    return list(dict.fromkeys(labels))


def _word(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def former_name(folder: Path, label: str, seed: Value) -> str:
    """Name of the run in `folder` that a variant starts from: its own, else that of the same
    variant with other novel-shots, which do not change what was trained."""
    own = folder_name(label, seed)
    words = [word for word in label.split() if not word.startswith("novel-shots=")]
    return own if (folder / own).is_dir() else folder_name(" ".join(words), seed)


def run_folder(folder: Path, name: str) -> Path:
    """The folder of the run `name` (that of `folder_name`): `folder` itself, or in it."""
    folder = folder.resolve()
    return folder if (folder / "config.toml").is_file() else folder / name


def saved_runs(folder: Path) -> tuple[str, str]:
    """Methods and seeds of the run, or of the runs, that `folder` holds; ValueError if none."""
    runs = [f for f in (folder, *sorted(folder.glob("*-seed*"))) if (f / "config.toml").is_file()]
    if not runs:
        raise ValueError(f"{folder} holds no finished run")
    found = [(run, saved_configuration(run)) for run in runs]
    methods = dict.fromkeys(label_of(run, str(config["method"])) for run, config in found)
    seeds = dict.fromkeys(str(config["seed"]) for _, config in found)
    return ",".join(methods), ",".join(seeds)


def run_configuration(run: Path) -> Config:
    """What a run was configured with. Raises ValueError, naming the file, if it is not whole."""
    file = run / "config.toml"
    try:
        config = tomllib.loads(file.read_text("utf-8"))
        config.pop("versions", None)
        return override(defaults(), config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error


def saved_configuration(run: Path) -> Config:
    """What a finished run was configured with, its folders apart."""
    return run_configuration(run) | {"output-dir": "", "from-dir": ""}


# Where a run is, how it is begun and looked after, not what it computes.
CIRCUMSTANCES = ("output-dir", "resume", "checkpoint-every", "round-timeout", "start-timeout")


def differences(there: Mapping[str, Value], here: Mapping[str, Value]) -> str:
    """The keys in which two runs' configurations differ, with both values; "" if in none."""
    here = override(defaults(), here)
    other = [key for key in here if key not in CIRCUMSTANCES and there.get(key) != here[key]]
    return ", ".join(f"{key} is {there.get(key)!r} there, {here[key]!r} here" for key in other)


def parse_override(argument: str) -> tuple[str, Value]:
    """``key=value`` with a TOML value; a word without quotes is a text."""
    key, separator, text = argument.partition("=")
    if not separator or not key:
        raise ValueError(f"{argument!r} is neither an experiment's .toml file nor key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text
    if not isinstance(value, Value):
        raise ValueError(f"{key} is {text:.200}; it must be a text, a number, true or false")
    return key, value


def settings(config: Mapping[str, Value], method: str) -> dict[str, Any]:
    """Keyword arguments for a method's strategy and client: its own section over the common
    keys, with underscores for hyphens."""
    return references.options(config, "") | references.options(config, method)


def effective(config: Mapping[str, Value], key: str) -> Value | None:
    """What holds for the configured method: its own section's value, else the common one."""
    return config.get(f"{config['method']}.{key}", config.get(key))


@cache
def accepted(cls: type) -> set[str]:
    """The names of what a class's constructor takes by keyword alone, its settings among them."""
    return set(taken(cls))


def construct(cls: type, *args: Any, config: Mapping[str, Value], method: str, **own: Any) -> Any:
    """``cls(*args, …)`` with those of the method's settings that it accepts, then `own`."""
    names = accepted(cls)
    return cls(*args, **{k: v for k, v in settings(config, method).items() if k in names} | own)


def check_method(name: Any) -> str:
    """`name` if it is a method; ValueError with the choices otherwise."""
    return METHODS.check(str(name))
