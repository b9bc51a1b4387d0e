"""Every setting of the package by its key, read from schema.json without any of the classes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from fedapps.common.settings import Setting, Value

FILE = Path(__file__).with_name("schema.json")


@cache
def declared() -> dict[str, Setting]:
    """Key → setting, those of sections as ``tent.adapt-steps``."""
    return dict(_settings(json.loads(FILE.read_text("utf-8"))["properties"], ""))


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
