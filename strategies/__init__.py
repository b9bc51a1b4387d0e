"""What runs on the server: Flower strategies and their maths.

`from fedapps.strategies import PFedHN` works for every strategy; a module is loaded when asked for.
"""

from partitions.lazy import lazy

_MODULES = {
    "AFL": "strategies.afl",
    "ATP": "strategies.atp",
    "BBSE": "strategies.label_shift",
    "CentralAdam": "strategies.preference",
    "FedAMP": "strategies.fedamp",
    "FedAvg": "strategies.fedavg",
    "FedEmbed": "strategies.fedembed",
    "FedGMA": "strategies.fedgma",
    "FedMA": "strategies.fedma",
    "FedMD": "strategies.fedmd",
    "FedRep": "strategies.fedrep",
    "FedTHE": "strategies.fedthe",
    "FedTTA": "strategies.fedtta",
    "HeteroFedTTA": "strategies.fedmd",
    "LGFedAvg": "strategies.lgfedavg",
    "ODPFLHN": "strategies.odpfl_hn",
    "PFL": "strategies.pfl",
    "PFLEnsemble": "strategies.pfl",
    "PFLNearest": "strategies.pfl",
    "PFedHN": "strategies.pfedhn",
    "PFedKM": "strategies.preference",
    "PFedMe": "strategies.pfedme",
    "PriorEM": "strategies.label_shift",
    "PeFLL": "strategies.pefll",
    "PersonalizedStrategy": "strategies.base",
    "Scaffold": "strategies.scaffold",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605
__getattr__ = lazy(__name__, _MODULES)
