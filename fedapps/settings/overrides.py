"""Changes of a configuration, checked, under one rule of precedence.

A common key such as ``lr`` changes every method, also one with a default of its own. A method's
key such as ``fedprox.lr`` is more specific: beside a common key it wins, in whatever order the two
stand. A later change wins over an earlier one, so a command wins over an experiment's file."""

import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from fedapps.common import external_code
from fedapps.common.external_code import Value, is_reference
from fedapps.common.settings import present_key, present_keys
from fedapps.methods import METHODS, Method
from fedapps.settings.schema import check, declared
from partitions.rules.registry import options_of

Config = dict[str, Value]
NAMING = ("method", "model", "client-models", "dataset", "partition", "novel-dataset")


def defaults() -> Config:
    """Every key with its default, flat: ``{"lr": 0.3, "tent.adapt-steps": 10, …}``.

    The section of a method that extends another holds all of its settings, the inherited ones, too.
    So do the configurations of saved runs."""
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
    for key in sorted(changes, key=_section):  # common keys first: a method's key wins over them
        if key not in result:
            raise ValueError(_unknown(key, result))
        value, former = changes[key], result[key]
        if type(value) is not type(former) or value != former:
            result[key] = check(key, value, former)
            for heir in _heirs(key, former, result, changes):
                result[heir] = result[key]
        if all_methods and not _section(key):
            for own_key in method_keys(key, result):
                result[own_key] = result[key]
    return result


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


def resolve(run_config: Mapping[str, Value]) -> Config:
    """All keys of a run's configuration, under the rule of precedence; errors as `override`."""
    if run_config.keys() >= declared().keys():
        # Only a resolved configuration has the keys that sections inherit. Each of its sections
        # already has the values that hold, also where these are the defaults.
        return override(defaults(), run_config, all_methods=False)
    return override(defaults(), said(run_config))


def method_keys(key: str, config: Mapping[str, Value]) -> list[str]:
    """The keys in methods' sections that hold instead of a common key: "fedprox.lr" for "lr"."""
    own_keys = [f"{method}.{key}" for method in METHODS.known()]
    return [own_key for own_key in own_keys if own_key in config]


def _section(key: str) -> str:
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
        sections = [_section(key) for key in settings if ":" in key]
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
    for key, value in config.items():
        names_code = key.rpartition(".")[2] in NAMING
        if names_code and isinstance(value, str) and ":" in value:
            words += [word.strip() for word in value.split(",")]
    return words


def relevant(config: Mapping[str, Value]) -> Config:
    """The settings that a run reads: its method's section, the common ones that this section does
    not set, the options of its partition rule, and the sections of code from outside."""
    method = str(config["method"])
    options = {f"partition.{name}" for name in options_of(config)}
    sections = {method, *_references(config)}

    def reads(key: str) -> bool:
        section = _section(key)
        if section == "partition":
            return key in options
        if section == "":
            return f"{method}.{key}" not in config
        return section in sections

    return {key: value for key, value in config.items() if reads(key)}


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
    from fedapps.settings.declarations import of_method

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
    return present_key(key), value
