"""The Flower apps, the table of methods, the in-process grid and the command.

`client_app` and `server_app` put a method into an app of your own, `from_client_fn` an older app's
clients; `InProcessGrid` tests strategies; `load` opens a finished run; `allow` lets references
``module:NAME`` of configurations be imported."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedapps.engines.grid import InProcessGrid
    from fedapps.legacy import from_client_fn
    from fedapps.plugin import client_app, server_app
    from fedapps.service.run import load
    from partitions.trust import allow

__all__ = ["InProcessGrid", "allow", "client_app", "from_client_fn", "load", "server_app"]
_MODULES = {
    "InProcessGrid": "fedapps.engines.grid",
    "allow": "partitions.trust",
    "client_app": "fedapps.plugin",
    "from_client_fn": "fedapps.legacy",
    "load": "fedapps.service.run",
    "server_app": "fedapps.plugin",
}

ROOT = Path(__file__).resolve().parents[1]

for _name in ("partitions", "clients", "strategies"):
    _found = find_spec(_name)
    _folders = (_found and _found.submodule_search_locations) or []
    if _other := [f for f in _folders if Path(f).resolve().parent != ROOT]:
        raise ImportError(
            f"{_other[0]} hides the package {_name!r} that fedapps needs; keep a folder of that "
            "name inside your app's own package"
        )


def __getattr__(name: str) -> Any:  # an app that needs only a strategy imports only that
    if name not in _MODULES:
        raise AttributeError(f"module 'fedapps' has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)
