"""Settings that are read beside another setting alone: refused where that one is off."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fedapps.settings.overrides import Config
from fedapps.settings.schema import declared
from fedapps.settings.variants import Variant, ancestors


def check_companions(
    config: Mapping[str, Any],
    changes: Collection[str],
    methods: Sequence[str],
    from_file: Collection[str] = (),
) -> None:
    """Raise ValueError for one of the `changes`, which `config` has, or for a setting of a method's
    label, that no run reads, as its declaration's `beside` says.

    A key that is `from_file` may be meant for a run whose settings differ."""
    wanted: dict[str, str] = {}  # of each key that some run does not read, why not
    read: set[str] = set()
    for label in methods:
        variant = Variant.parse(label)
        run = variant.apply(config)
        for key in {*changes, *variant.settings}:
            if key in from_file and key not in variant.settings:
                continue
            for own_key, condition in _conditions(key, variant.method, run):
                if _holds(condition, variant.method, run):
                    read.add(key)
                else:
                    wanted[key] = _unread(own_key, condition, variant.method, run)
    for key in sorted(wanted.keys() - read):
        raise ValueError(wanted[key])


def check_beside(method: str, config: Mapping[str, Any], given: Collection[str]) -> None:
    """The same for one method and the keys that were `given` for it."""
    check_companions({**config, "method": method}, given, [method])


def _conditions(key: str, method: str, config: Config) -> Iterator[tuple[str, str]]:
    """The key that holds for the method, with the condition of its declaration, if it has one."""
    section, _, name = key.rpartition(".")
    if section not in ("", method, *ancestors(method)):
        return
    own = _key(name, method, config)
    if own in declared() and declared()[own].beside:
        yield own, declared()[own].beside


def _holds(condition: str, method: str, config: Config) -> bool:
    """Whether the setting that the condition names has a value with which others are read."""
    name, unequal, value = _parsed(condition)
    return (str(config[_key(name, method, config)]) == value) != unequal


def _parsed(condition: str) -> tuple[str, bool, str]:
    """The name in a condition, whether it says "!=", and the value."""
    name, _, value = condition.partition("=")
    return name.removesuffix("!"), name.endswith("!"), value


def _key(name: str, method: str, config: Config) -> str:
    """The key that holds for the method."""
    own = f"{method}.{name}"
    return own if own in config else name


def _unread(key: str, condition: str, method: str, config: Config) -> str:
    """What to say of a key that is not read."""
    name, unequal, value = _parsed(condition)
    other = _key(name, method, config)
    needed = f"set {other} as well" if unequal else f"set {other} to {value}"
    return (
        f"{key}={config[key]} changes nothing here, since {other} is {config[other]!r}; {needed}, "
        "or leave it out"
    )
