"""Public names of a package whose modules are imported when a name is asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package; `modules` maps each public name to its module."""

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no {name!r}; it has {', '.join(modules)}")
        return getattr(import_module(modules[name]), name)

    return __getattr__
