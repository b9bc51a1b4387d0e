"""What runs on the server: Flower strategies and their maths.

`from fedapps.strategies import PFedHN` works for every strategy, and for what a method's author
needs beside them. A module is loaded when asked for.
"""

from fedapps.common.lazy import lazy

_MODULES = {
    "AFL": "strategies.methods.afl",
    "ATP": "strategies.methods.atp",
    "BBSE": "strategies.methods.bbse",
    "CentralAdam": "strategies.methods._preferences",
    "FedAMP": "strategies.methods.fedamp",
    "FedAvg": "strategies.methods.fedavg",
    "FedEmbed": "strategies.methods.fedembed",
    "FedGMA": "strategies.methods.fedgma",
    "FedMA": "strategies.methods.fedma",
    "FedMD": "strategies.methods.fedmd",
    "FedRep": "strategies.methods.fedrep",
    "FedTHE": "strategies.methods.fedthe",
    "FedTTA": "strategies.methods.fedtta",
    "HeteroFedTTA": "strategies.methods.fedmd",
    "LGFedAvg": "strategies.methods.lgfedavg",
    "Node": "strategies.core.replies",
    "ODPFLHN": "strategies.methods.odpfl_hn",
    "PFL": "strategies.methods.pfl",
    "PFLEnsemble": "strategies.methods.pfl",
    "PFLNearest": "strategies.methods.pfl",
    "PFedHN": "strategies.methods.pfedhn",
    "PFedKM": "strategies.methods._preferences",
    "PFedMe": "strategies.methods.pfedme",
    "PriorEM": "strategies.methods.prior_em",
    "PeFLL": "strategies.methods.pefll",
    "PersonalizedStrategy": "strategies.core.strategy",
    "Scaffold": "strategies.methods.scaffold",
    "Stop": "strategies.core.strategy",
    "Update": "strategies.core.replies",
    "mean": "strategies.core.aggregation",
    "weighted_mean": "strategies.core.aggregation",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605
__getattr__ = lazy(__name__, _MODULES)
