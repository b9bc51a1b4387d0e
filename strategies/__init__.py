"""What runs on the server: Flower strategies and their maths.

`from strategies import PFedHN` works for every strategy; a module is loaded when asked for."""

from importlib import import_module
from typing import Any

_MODULES = {
    "AFL": "afl",
    "CentralAdam": "preference",
    "FedAMP": "fedamp",
    "FedAvg": "fedavg",
    "FedEmbed": "fedembed",
    "FedGMA": "fedgma",
    "FedMA": "fedma",
    "FedMD": "fedmd",
    "FedRep": "fedrep",
    "FedTTA": "fedtta",
    "HeteroFedTTA": "fedmd",
    "LGFedAvg": "lgfedavg",
    "ODPFLHN": "odpfl_hn",
    "PFL": "pfl",
    "PFLNearest": "pfl",
    "PFedHN": "pfedhn",
    "PFedKM": "preference",
    "PFedMe": "pfedme",
    "PeFLL": "pefll",
    "PersonalizedStrategy": "base",
    "Scaffold": "scaffold",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'strategies' has no {name!r}; it has {', '.join(_MODULES)}")
    return getattr(import_module(f"strategies.{_MODULES[name]}"), name)
