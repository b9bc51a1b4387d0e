"""Code that may run: the references ``module:NAME`` that the user named.

Allowed are the references that the user typed, those in ``--allow`` or FEDAPPS_ALLOW, and the list
`allow` in ``~/.config/fedapps/config.toml``; on a node also `allow` in its node configuration. A
reference that only a saved run or a server names is refused before it is imported."""

import os
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "FEDAPPS_ALLOW"  # processes that this one starts inherit it


def is_reference(name: str) -> bool:
    """Whether the name has the form ``module:NAME``."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), attribute))


def named(config: Any) -> list[str]:
    """The references anywhere in a configuration: in texts, lists and keys."""
    if isinstance(config, str):
        return [word for word in re.split(r"[\s,]+", config) if is_reference(word)]
    if isinstance(config, Mapping):
        keys = [word for key in config for word in (key, key.rpartition(".")[0]) if ":" in key]
        return [*filter(is_reference, keys), *named([*config.values()])]
    if isinstance(config, list | tuple):
        return [word for value in config for word in named(value)]
    return []


def allow(*references: str) -> None:
    """Let this process, and those that it starts, import these references.

    Raises ValueError for a text of another form."""
    for reference in references:
        if not is_reference(reference):
            raise ValueError(f"{reference!r} cannot be allowed; name it as module:NAME")
    if references:
        known = [word for word in os.environ.get(VARIABLE, "").split(",") if word]
        os.environ[VARIABLE] = ",".join(dict.fromkeys([*known, *references]))


def check(reference: str) -> None:
    """Raise ValueError unless the user named this very reference."""
    words = {word.strip() for word in os.environ.get(VARIABLE, "").split(",")}
    if reference not in words and reference not in _listed(user_file()):
        raise ValueError(
            f"{reference!r} is code from outside the package, and you have not allowed it; if you "
            f"trust it: --allow {reference}, or {VARIABLE}, or the list allow in {user_file()}; "
            "on a node: allow in its node configuration"
        )


def user_file() -> Path:
    """The user's own configuration."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return folder / "fedapps/config.toml"


@cache
def _listed(file: Path) -> frozenset[str]:
    """The references that the user's configuration allows."""
    try:
        allowed = tomllib.loads(file.read_text("utf-8")).get("allow", [])
    except OSError:  # most users have none
        return frozenset()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no valid TOML: {error}") from error
    if not isinstance(allowed, list) or not all(isinstance(word, str) for word in allowed):
        raise ValueError(f"{file}: allow is {allowed!r:.200}; it must be a list of module:NAME")
    return frozenset(allowed)
