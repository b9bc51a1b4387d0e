"""``module:NAME``: methods, models, datasets and partitions from outside the package.

A reference has the form of Flower's references to components. Python looks for its module on
PYTHONPATH, in the environment, in the folder of the Flower app and in the current folder. An object
is called only for the purpose that it is declared for. Its keyword arguments with a default are
settings ``module:NAME.key`` of the configuration: the signature declares them, the default gives
the type.

A reference is imported only if the user allowed it: typed it, or listed it in ``--allow``, in
FEDAPPS_ALLOW, or under `allow` in ``~/.config/fedapps/config.toml``. On a node, `allow` in its node
configuration counts too. A reference from a saved run or a server is refused before its import."""

import hashlib
import importlib
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar, get_origin, get_type_hints

from fedapps.common.home import home_folder
from fedapps.common.spelling import did_you_mean

__all__ = ["Registry", "Value", "is_reference", "load"]

Value = str | int | float | bool
Entry = TypeVar("Entry")
# Arguments that the package passes itself. They are no settings, whatever their defaults.
FILLED = {"shape", "num_classes", "num_clients", "num_partitions", "partition_by", "novel", "seed"}
PACKAGES: tuple[str, ...] = ("fedapps",)
if not (Path(__file__).parents[1] / "clients").is_dir():  # a checkout; a wheel has one package
    PACKAGES += ("partitions", "clients", "strategies", "experiments")


def load(reference: str) -> Any:
    """What ``module:NAME`` names. Raises ValueError if the user has not allowed it, and if there is
    no such module or name."""
    check(reference)
    return _imported(reference)


_sources: dict[str, str] = {}  # digests of the modules' sources as they were imported


@cache
def _imported(reference: str) -> Any:
    module, _, name = reference.partition(":")
    find_here()
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{reference!r}: {error}; modules are looked for on PYTHONPATH, in the environment and "
            f"in the folder of the call, {Path.cwd()}"
        ) from error
    _sources[reference] = _digest_of_source(module)
    if not hasattr(imported, name):
        defined = [n for n, v in vars(imported).items() if getattr(v, "__module__", "") == module]
        listed = ", ".join(defined) or "–"
        raise ValueError(f"{reference!r}: {module} has no {name}; it has {listed}")
    return getattr(imported, name)


@cache
def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword arguments of a function with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def declared(function: Callable[..., Any]) -> dict[str, Value]:
    """The settings of a function: its keyword arguments whose defaults a configuration can hold,
    with hyphens for underscores."""
    return {
        name.replace("_", "-"): default
        for name, default in keywords(function).items()
        if isinstance(default, Value) and name not in FILLED
    }


def source_code(reference: str) -> str:
    """A digest of the source of the module that `reference` names, "" if it has none. A cached
    result of the code is stale when the digest changes. Errors as `load`.

    The digest is of the source at the import: a later edit does not change what this process
    computes."""
    load(reference)
    if reference not in _sources:
        _sources[reference] = _digest_of_source(reference.partition(":")[0])
    return _sources[reference]


def _digest_of_source(module: str) -> str:
    imported = sys.modules[module]
    file = getattr(imported, "__file__", None)
    if file is None:  # a built-in module, or a folder without __init__.py
        return ""
    # A module in a zip archive has a path that no file has; its loader can read it.
    read = getattr(getattr(imported, "__loader__", None), "get_data", None)
    try:
        data = Path(file).read_bytes() if read is None else read(file)
    except OSError as error:
        raise ValueError(
            f"{module} was imported from {file}, which cannot be read any more; put the file "
            "back, or start Python anew"
        ) from error
    return hashlib.blake2b(data, digest_size=8).hexdigest() if data else ""


def find_here() -> None:
    """Let this process and its child processes find modules in the current folder.

    A folder that holds packages of this project's names is left out: they would be imported
    instead of this project's."""
    here = Path.cwd()
    if any((here / name).exists() for name in PACKAGES):
        return
    # Absolute paths, since child processes run in other folders.
    paths: dict[str, None] = {}
    for path in (*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(here)):
        if path:
            paths[str(Path(path).absolute())] = None
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # Last, so that no file of the folder hides an installed package.
    if str(here) not in sys.path:
        sys.path.append(str(here))


def declares_return_type(found: Any, *kinds: type) -> bool:
    """Whether an object is a subclass of one of the `kinds`, or a function that is annotated to
    return one. Nothing is called."""
    made = found.func if isinstance(found, partial) else found
    if inspect.isfunction(made):
        made = return_annotation(made)
    return of_kind(made, *kinds)


def return_annotation(function: Any) -> Any:
    """A function's return type. None if it has no annotation, or one that cannot be resolved."""
    try:
        return get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):
        return None


def described(found: Any) -> str:
    """An object that is not of the kind that was asked for, for a message."""
    if inspect.isfunction(found) and "return" not in found.__annotations__:
        return "a function without a return annotation"
    return f"{found!r:.200}"


def of_kind(annotation: Any, *kinds: type) -> bool:
    """Whether a type, with or without parameters, is one of the `kinds`."""
    plain = get_origin(annotation) or annotation
    return isinstance(plain, type) and issubclass(plain, kinds)


def call_with(
    name: str, function: Any, given: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """``function(…)`` with those of the `given` arguments that it has as parameters, and with the
    `options`. Raises ValueError for a parameter without a default that is not `given`."""
    if not callable(function):
        raise ValueError(f"{name!r} is {function!r}; it must be a function or a class")
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind not in VARIADIC
        if needed and parameter.name not in given:
            raise ValueError(
                f"{name!r} needs {parameter.name!r}; it is given {', '.join(given) or 'nothing'}, "
                f"and what has a default of its own"
            )
    arguments = {name: value for name, value in given.items() if name in parameters}
    return function(**arguments | dict(options))


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Registry(dict[str, Entry], Generic[Entry]):
    """name → entry of a kind; a reference is a name as well, made an entry by `adopt`.

    Iteration yields the package's own names. ``table[name]`` raises ValueError with the choices
    for a name that is neither."""

    def __init__(
        self, kind: str, entries: Mapping[str, Entry], adopt: Callable[[str, Any], Entry]
    ) -> None:
        super().__init__(entries)
        self.kind = kind
        self._adopt = adopt
        self._adopted: dict[str, Entry] = {}

    def check(self, name: str) -> str:
        """The name, if it is one; ValueError with the choices otherwise."""
        _ = self[name]
        return name

    def known(self) -> dict[str, Entry]:
        """The package's own entries, and the references that were adopted so far."""
        return {**self, **self._adopted}

    def __missing__(self, name: str) -> Entry:
        if not is_reference(name):
            raise ValueError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self)}; known: "
                f"{', '.join(self)}, and module:NAME"
            )
        found = load(name)
        if name not in self._adopted:
            self._adopted[name] = self._adopt(name, found)
        return self._adopted[name]


VARIABLE = "FEDAPPS_ALLOW"  # child processes inherit it


def is_reference(name: str) -> bool:
    """Whether the name has the form ``module:NAME``."""
    module, colon, attribute = name.partition(":")
    if not colon:  # nearly all names, and quickly seen
        return False
    return all(part.isidentifier() for part in (*module.split("."), attribute))


def named(config: Any) -> list[str]:
    """The references anywhere in a configuration: in texts, lists and keys."""
    if isinstance(config, str):
        if ":" not in config:  # nearly all texts, and quickly seen
            return []
        return [word for word in re.split(r"[\s,]+", config) if is_reference(word)]
    references: list[str] = []
    if isinstance(config, Mapping):
        for key in config:
            if ":" in key:
                # A table's name, or the section in a flat key.
                references += filter(is_reference, (key, key.rpartition(".")[0]))
        references += named([*config.values()])
    elif isinstance(config, list | tuple):
        for value in config:
            references += named(value)
    return references


def allow(*references: str) -> None:
    """Let this process and its child processes import these references.

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
    folder = os.environ.get("XDG_CONFIG_HOME")
    if not folder:
        return home_folder() / ".config/fedapps/config.toml"
    return Path(folder).expanduser() / "fedapps/config.toml"


@cache
def _listed(file: Path) -> frozenset[str]:
    """The references that the user's configuration allows."""
    try:
        allowed = tomllib.loads(file.read_text("utf-8-sig")).get("allow", [])
    except OSError:  # most users have none
        return frozenset()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no valid TOML: {error}") from error
    if not isinstance(allowed, list) or not all(isinstance(word, str) for word in allowed):
        raise ValueError(f"{file}: allow is {allowed!r:.200}; it must be a list of module:NAME")
    return frozenset(allowed)
