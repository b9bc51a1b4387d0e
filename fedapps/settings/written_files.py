"""The two files that are written from the declarations: schema.json and a part of pyproject.toml.

A run reads schema.json. Flower reads pyproject.toml, and takes only keys that stand there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapps.common.settings import Setting, Value
from fedapps.methods import METHODS
from fedapps.settings.config import SCHEMA, declared
from fedapps.settings.sections import Settings, common, of_partitions, sections

BEGIN = (
    "# Written by `fedapps settings --write`, up to the end mark: change the declarations instead."
)
FLOWER = """\
# `flwr run --run-config` takes the keys that stand here alone. To change there what a method
# inherits, as fedtta++.inner-lr, add the key to its section; `fedapps run` takes it as it is."""
END = "# End of what `fedapps settings --write` writes."
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


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
    SCHEMA.write_text(json_schema(), "utf-8")
    declared.cache_clear()
    return [PYPROJECT, SCHEMA]
