"""The configuration of a run: flat keys with values, from the defaults to a class's constructor.

Changes are checked, under one rule of precedence. A common key such as ``lr`` changes every method,
also one with a default of its own. A method's key such as ``fedprox.lr`` is more specific: beside a
common key it wins, in whatever order the two stand. A later change wins over an earlier one, so a
command wins over an experiment's file."""

import json
import re
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fedapps.common import external_code
from fedapps.common.external_code import Value, is_reference
from fedapps.common.lazy import lazy
from fedapps.common.settings import (
    Setting,
    keyword_arguments,
    present_key,
    present_keys,
    taken,
)
from fedapps.methods import METHODS, Method, chosen_from
from fedapps.settings.rates import task_of, with_rate_of_task
from fedapps.settings.sections import of_method
from partitions.rules.registry import options_of

Config = dict[str, Value]
SCHEMA = Path(__file__).with_name("schema.json")
OPEN_DECIMAL = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?", re.ASCII)  # no number in TOML
NAMING = (
    "method",
    "model",
    "client-models",
    "dataset",
    "partition",
    "novel-dataset",
    "candidates",
)

# What reads saved runs has moved; the former names stay for one release.
MOVED = ("ordered", "run_configuration", "run_folders", "saved_configuration", "saved_runs")
__getattr__ = lazy(__name__, dict.fromkeys(MOVED, "fedapps.settings.saved_configurations"))


# Keys, from schema.json: the classes that declare settings are not imported


@cache
def declared() -> dict[str, Setting]:
    """Key → setting, those of sections as ``tent.adapt-steps``."""
    return dict(_settings(json.loads(SCHEMA.read_text("utf-8"))["properties"], ""))


def _settings(properties: dict[str, Any], prefix: str) -> list[tuple[str, Setting]]:
    known: list[tuple[str, Setting]] = []
    for key, schema in properties.items():
        if "properties" in schema:
            known += _settings(schema["properties"], f"{prefix}{key}.")
        elif "default" in schema:
            known.append((prefix + key, Setting.from_schema(schema)))
    return known


def check(key: str, value: Value, default: Value) -> Value:
    """`value` in the type of its setting, that of `default` where other code declares the key.

    Raises ValueError, naming the value and the range or the choices, if it does not fit."""
    return declared().get(key, Setting(default, "")).checked(key, value)


def listed(key: str) -> bool:
    """Whether the text of a setting is a list; the key may be a list's in an experiment."""
    return key == "methods" or (key in declared() and declared()[key].listed)


# Changes


def parse_override(argument: str) -> tuple[str, Value]:
    """``key=value`` with a TOML value; a word without quotes is a text, and .5 is 0.5."""
    key, separator, text = argument.partition("=")
    if not separator or not key:
        raise ValueError(f"{argument!r} is neither an experiment's .toml file nor key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = float(text) if OPEN_DECIMAL.fullmatch(text) else text
    if not isinstance(value, Value):
        raise ValueError(f"{key} is {text:.200}; it must be a text, a number, true or false")
    return present_key(key), value


def set_twice(arguments: Iterable[str]) -> list[str]:
    """A sentence for each of the ``key=value`` arguments that a later one replaces by another
    value."""
    notes = []
    latest: dict[str, str] = {}  # argument by key
    for argument in arguments:
        key = present_key(argument.partition("=")[0], silent=True)
        if latest.get(key, argument) != argument:
            notes.append(f"{latest[key]} and {argument} set {key} twice; the last one counts")
        latest[key] = argument
    return notes


def defaults() -> Config:
    """Every key with its default, flat: ``{"lr": 0.3, "tent.adapt-steps": 10, …}``.

    The section of a method that extends another holds all of its settings, the inherited ones, too.
    So do the configurations of saved runs."""
    return dict(_defaults())


@cache
def _defaults() -> Config:
    return {key: setting.default for key, setting in declared().items()}


def override(
    config: Mapping[str, Value], changes: Mapping[str, Any], *, all_methods: bool = True
) -> Config:
    """`config` with `changes` of equal rank. Raises ValueError for unknown keys, wrong types and
    values out of range.

    A common key replaces the values in all methods' sections, unless `all_methods` is off. A method
    that extends another follows its changes, where it has the same value and is not changed
    itself."""
    changes = present_keys(changes)
    result = with_references(config, changes)
    keys = [*changes]
    if not all_methods:
        # A common key changes no other one: a value that stays needs no check.
        keys = [k for k in keys if k not in result or not _is_same(changes[k], result[k])]
    for key in sorted(keys, key=section_of):  # common keys first: a method's key wins over them
        if key not in result:
            raise ValueError(_unknown(key, result))
        value = changes[key]
        former = result[key]
        if not _is_same(value, former):
            result[key] = check(key, value, former)
            for heir in _heirs(key, former, result, changes):
                result[heir] = result[key]
        if all_methods and not section_of(key):
            for own_key in method_keys(key, result):
                result[own_key] = result[key]
    return result


def _is_same(value: Any, former: Value) -> bool:
    """Whether both are one value of one type: 1 is not 1.0, nor True."""
    return type(value) is type(former) and bool(value == former)


def method_keys(key: str, config: Mapping[str, Value]) -> list[str]:
    """The keys in methods' sections that hold instead of a common key: "fedprox.lr" for "lr"."""
    own_keys = [f"{method}.{key}" for method in METHODS.known()]
    return [own_key for own_key in own_keys if own_key in config]


def section_of(key: str) -> str:
    """The section of a key: "tent" of "tent.adapt-steps", "" of a common key."""
    return key.rpartition(".")[0]


def _heirs(
    key: str, value: Value, config: Mapping[str, Value], changes: Mapping[str, Any]
) -> Iterator[str]:
    """The keys of the methods that inherit the `value` of a method's key."""
    section, _, name = key.rpartition(".")
    if not section:
        return
    for heir, method in METHODS.known().items():
        if method.extends != section:
            continue
        inherited = f"{heir}.{name}"
        follows = inherited in config and config[inherited] == value
        if follows and inherited not in changes:
            yield inherited
            yield from _heirs(inherited, value, config, changes)


def with_references(config: Mapping[str, Value], changes: Mapping[str, Any]) -> Config:
    """`config` with the settings of whatever it or `changes` refer to outside the package."""
    result = dict(config)
    for settings in (config, changes):
        sections = [section_of(key) for key in settings if ":" in key]
        references = filter(is_reference, [*_references(settings), *sections])
        for reference in dict.fromkeys(references):
            parent = METHODS[reference].extends if is_method(reference) else ""
            for name, default in own_settings(reference).items():
                parent_key = f"{parent}.{name}"
                # An inherited default follows the parent's present value.
                inherits = default == defaults().get(parent_key)
                value = result[parent_key] if inherits else default
                result.setdefault(f"{reference}.{name}", value)
    return result


def _references(config: Mapping[str, Value]) -> list[str]:
    """The code from outside that the values of a configuration name."""
    words: list[str] = []
    for key in _naming_keys(tuple(config)):
        value = config[key]
        if isinstance(value, str) and ":" in value:
            words += [word.strip() for word in value.split(",")]
    return words


@lru_cache(maxsize=64)
def _naming_keys(keys: tuple[str, ...]) -> list[str]:
    """Those that may name code from outside. Each change asks, mostly of the same hundreds of
    keys."""
    return [key for key in keys if key.rpartition(".")[2] in NAMING]


def is_method(reference: str) -> bool:
    """Whether ``module:NAME`` is a method."""
    return isinstance(external_code.load(reference), Method)


def own_settings(reference: str) -> Config:
    """The settings that ``module:NAME`` declares, with their defaults.

    Of a method: those of its section; of anything else: what the function takes by keyword.
    Raises ValueError for one that nobody reads."""
    found = external_code.load(reference)
    if not isinstance(found, Method):
        function = getattr(found, "build", found)
        return external_code.declared(function) if callable(function) else {}
    return {key: setting.default for key, setting in of_method(reference, found).items()}


def _unknown(key: str, config: Config) -> str:
    """What to say of a key that `config` lacks: the nearest, those beside it, or all sections."""
    section, _, name = key.rpartition(".")
    if name in config and section in METHODS.known():
        return (
            f"unknown key {key!r}: {section} reads the common {name!r}; set it for all methods, "
            f'or run the variant "{section} {name}=…"'
        )
    known = sorted(k for k in config if k.rpartition(".")[0] == section)
    near = get_close_matches(key, config, n=1, cutoff=0.8)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    if known:
        return f"unknown key {key!r}{meant}; known: {', '.join(known)}"
    sections = sorted({k.rpartition(".")[0] for k in config} - {""})
    return f"unknown key {key!r}{meant}; no settings of {section!r}, but of {', '.join(sections)}"


# The configuration that Flower gives to the apps


def said(run_config: Mapping[str, Value]) -> Config:
    """What the user of ``flwr run`` said. Flower fills a run's configuration with the defaults in
    pyproject.toml: a value there that is the default was not said."""
    known = declared()
    result: Config = {}
    for key, value in run_config.items():
        is_filled = key in known and known[key].is_default(value) and not _is_inherited(key)
        if not is_filled:
            result[key] = value
    return result


def _is_inherited(key: str) -> bool:
    """Whether pyproject.toml lacks the key, since the default is that of the extended method."""
    section, _, name = key.rpartition(".")
    parent = METHODS[section].extends if section in METHODS else ""
    inherited = f"{parent}.{name}"
    known = declared()
    return inherited in known and known[inherited].default == known[key].default


def resolve(run_config: Mapping[str, Value], *, reads_data: bool = False) -> Config:
    """All keys of a run's configuration, under the rule of precedence; errors as `override`.

    With `reads_data`, data in the configuration may say that the task is values to predict, which
    have a default learning rate of their own."""
    if is_resolved(run_config):
        # Each of its sections already has the values that hold, also where these are the defaults.
        return override(defaults(), run_config, all_methods=False)
    given = said(run_config)
    config = override(defaults(), given)
    task = task_of(config) if reads_data else str(config["task"])
    return with_rate_of_task(config, defaults(), given, task)


def is_resolved(run_config: Mapping[str, Value]) -> bool:
    """Whether it has the keys that sections inherit, as only a resolved configuration has."""
    return run_config.keys() >= declared().keys()


def completed(run_config: Mapping[str, Value], *, trusted: bool = False) -> Config:
    """A run's configuration, with defaults for the keys that its app does not declare; errors as
    `override`. References in a `trusted` one are allowed. It is called for every message, so the
    last results are cached: equal run configurations give one object, which nobody may change."""
    for known, config in [*_completed]:
        if known == run_config:
            return config
    if trusted:
        external_code.allow(*external_code.named(run_config))
    config = resolve(run_config, reads_data=trusted)
    _completed.appendleft((dict(run_config), config))
    return config


_completed: deque[tuple[Config, Config]] = deque(maxlen=8)  # run configurations, and completed ones


# What a method reads of a configuration


def relevant(config: Mapping[str, Value]) -> Config:
    """The settings that a run reads: its method's section and those of the methods that its clients
    choose from, the common ones that the method's section does not set, the options of its
    partition rule, and the sections of code from outside."""
    method = str(config["method"])
    options = {f"partition.{name}" for name in options_of(config)}
    sections = {method, *chosen_from(method, config), *_references(config)}

    def reads(key: str) -> bool:
        section = section_of(key)
        if section == "partition":
            return key in options
        if section == "":
            return f"{method}.{key}" not in config
        return section in sections

    return {key: value for key, value in config.items() if reads(key)}


def settings(config: Mapping[str, Value], method: str) -> dict[str, Any]:
    """Keyword arguments for a method's strategy and client: its own section over the common
    keys, with underscores for hyphens."""
    return keyword_arguments(config, "", method)


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
