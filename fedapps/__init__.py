"""The Flower apps, the table of methods, the engines and the command.

`run` trains, `read` opens a folder of runs, `load` one finished run, `load_personal` a delivered
model. `client_app` and `server_app` put a method into an app of your own, `from_client_fn` an older
app's clients; `InProcessGrid` tests strategies. `allow` lets references ``module:NAME`` of
configurations be imported."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedapps.api import read, run
    from fedapps.common.external_code import allow
    from fedapps.engines.in_process_grid import InProcessGrid
    from fedapps.own_app import client_app, server_app
    from fedapps.own_client_fn import from_client_fn
    from fedapps.service.delivery import load_personal
    from fedapps.service.finished_run import load

__all__ = ["InProcessGrid", "allow", "client_app", "from_client_fn", "load", "load_personal",
           "read", "run", "server_app"]  # fmt: skip
_MODULES = {
    "InProcessGrid": "fedapps.engines.in_process_grid",
    "allow": "fedapps.common.external_code",
    "client_app": "fedapps.own_app",
    "from_client_fn": "fedapps.own_client_fn",
    "load": "fedapps.service.finished_run",
    "load_personal": "fedapps.service.delivery",
    "read": "fedapps.api",
    "run": "fedapps.api",
    "server_app": "fedapps.own_app",
}

HERE = Path(__file__).resolve().parent

for _name in ("partitions", "clients", "strategies"):  # beside this folder, in a checkout
    _found = find_spec(_name) if not (HERE / _name).is_dir() else None
    _folders = (_found and _found.submodule_search_locations) or []
    if _other := [f for f in _folders if Path(f).resolve().parent != HERE.parent]:
        raise ImportError(
            f"{_other[0]} hides the package {_name!r} that fedapps needs; keep a folder of that "
            "name inside your app's own package"
        )

from fedapps.common.lazy import lazy  # noqa: E402

__getattr__ = lazy(__name__, _MODULES)  # an app that needs only a strategy imports only that
