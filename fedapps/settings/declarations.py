"""The declarations of all classes: collected, and written to pyproject.toml and schema.json.

Only here are the classes imported; a run reads schema.json, and Flower pyproject.toml."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fedapps.common.settings import Configured, Setting, Value, key_of
from fedapps.methods import METHODS, Method
from fedapps.settings import schema
from fedapps.settings.run import RunSettings
from partitions.rules.registry import RULES, Options

Settings = dict[str, Setting]
BEGIN = (
    "# Written by `fedapps settings --write`, up to the end mark: change the declarations instead."
)
FLOWER = """\
# `flwr run --run-config` takes the keys that stand here alone. To change there what a method
# inherits, as fedtta++.inner-lr, add the key to its section; `fedapps run` takes it as it is."""
END = "# End of what `fedapps settings --write` writes."
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def of_class(cls: type[Configured]) -> Settings:
    """The settings of a class by key."""
    return {key_of(name): setting for name, setting in cls.declared.items()}


@cache
def common() -> Settings:
    """The settings of every run, and of every method that does not set them itself."""
    from clients.core.client import Client
    from clients.methods.pfedhn import NOVEL_ROUNDS
    from strategies.core.privacy import Privacy
    from strategies.methods.fedavg import FedAvg

    novel: Any = {"novel-rounds": NOVEL_ROUNDS}
    return of_class(RunSettings) | novel | of_class(Client) | of_class(FedAvg) | of_class(Privacy)


def of_partitions() -> Settings:
    """The options of the partition rules, with the rules that read each."""
    result = {}
    for key, setting in of_class(Options).items():
        rules = ", ".join(name for name, rule in RULES.items() if key in rule.options)
        meaning = f"{rules}: {setting.meaning}" if rules else setting.meaning
        result[f"partition.{key}"] = replace(setting, meaning=meaning)
    return result


def of_method(name: str, method: Method) -> Settings:
    """What the section of a method may set, with the defaults that hold for it: what its classes
    declare beyond the common settings, and the common ones for which it has another default.

    Raises ValueError for a default of a setting that nobody reads, or out of its range, and for a
    hidden setting that there is not."""
    read = of_class(method.client) | of_class(method.strategy)
    if unknown := sorted(set(method.hidden_settings) - read.keys()):
        raise ValueError(
            f"{name} hides {unknown[0]!r}, which its classes do not declare: {[*read]}"
        )
    known: Settings = {}
    if method.extends:
        # The parent's other defaults of common keys are inherited.
        parent = of_method(method.extends, METHODS[method.extends])
        known |= {key: setting for key, setting in parent.items() if key in common()}
    for key, setting in read.items():
        if key not in common() and key not in method.hidden_settings:
            known[key] = setting
    for key, setting in read.items():
        if key in common() and setting.default != common()[key].default:
            known[key] = replace(common()[key], default=setting.default)
    for key, default in method.settings.items():
        if key not in known and key not in common():
            raise ValueError(f"{name} sets {key!r}, which its classes do not declare: {[*read]}")
        declared = known.get(key) or common()[key]
        known[key] = replace(declared, default=declared.checked(f"{key} of {name}", default))
    return known


def sections() -> dict[str, Settings]:
    """The settings of each method of the package that has some."""
    known = {name: of_method(name, method) for name, method in METHODS.items()}
    return {name: settings for name, settings in known.items() if settings}


def json_schema() -> str:
    """The text of schema.json: what a configuration, and an experiment's TOML, may set."""
    names = {"type": ["string", "array"], "description": "separated by commas, or a list"}
    content = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of fedapps; written by `fedapps settings --write`",
        **_object(common() | of_partitions()),
        "patternProperties": {r"^(?!partition\.).*[.:]": {}},  # quoted keys, code from outside
    }
    lists = {"methods": names, "seeds": names, "include": names}
    content["properties"] |= lists | {"published": {}, "search": {}, "reasons": {}}
    content["properties"] |= {name: _object(known) for name, known in sections().items()}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _object(settings: Settings) -> dict[str, Any]:
    properties = {key: setting.schema() for key, setting in settings.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def toml() -> str:
    """The part of pyproject.toml that declares the configuration to Flower. A section holds what
    differs from that of the method that it extends."""
    lines = [BEGIN, FLOWER, "[tool.flwr.app.config]", *_lines(common())]
    lines += ["", "# `partition` is a key of its own, so its options are quoted."]
    lines += _lines({f'"{key}"': setting for key, setting in of_partitions().items()})
    known = sections()
    for name, settings in known.items():
        parent = known.get(METHODS[name].extends, {})
        differs: Settings = {}
        for key, setting in settings.items():
            if key not in parent or parent[key].default != setting.default:
                differs[key] = setting
        if differs:
            quoted = name if name.replace("-", "").isalnum() else f'"{name}"'
            above = f"  # what it does not set is {METHODS[name].extends}'s" if parent else ""
            lines += ["", f"[tool.flwr.app.config.{quoted}]{above}", *_lines(differs)]
    return "\n".join([*lines, "", END])


def _lines(settings: Mapping[str, Setting]) -> list[str]:
    return [
        f"{f'{key} = {_toml(setting.default)}':29} # {_comment(setting)}"
        for key, setting in settings.items()
    ]


def _comment(setting: Setting) -> str:
    if isinstance(setting.values, tuple):
        names_all = all(choice in setting.meaning for choice in setting.values)
        if not names_all:
            return f"{setting.meaning}; one of {setting.range}"
    return setting.meaning


def _toml(value: Value) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"{value:.12f}".rstrip("0") if isinstance(value, float) and "e" in text else text


def pyproject(text: str) -> str:
    """The text of pyproject.toml with its generated part rewritten."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"pyproject.toml lacks the line {BEGIN!r}, or {END!r}")
    return before + toml() + after


def write() -> list[Path]:
    """Write both files of a checkout; returns their paths. Raises ValueError outside of one."""
    if not PYPROJECT.is_file():
        raise ValueError(f"settings are written in a checkout: there is no {PYPROJECT}")
    PYPROJECT.write_text(pyproject(PYPROJECT.read_text("utf-8")), "utf-8")
    schema.FILE.write_text(json_schema(), "utf-8")
    schema.declared.cache_clear()
    return [PYPROJECT, schema.FILE]
