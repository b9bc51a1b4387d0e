"""LG-FedAvg server (Liang et al., 2020): FedAvg of the whole model, then of the shared layers.

A run that continues a second phase starts in it. Names on the wire: in the first phase
every name both ways, then the shared layers both ways, and once the body of FedAvg's last model to
each client. A client that has a body keeps it. Departs from the authors' code: means are weighted
by sample counts, not equal, and by default the head alone is shared, see
`clients.methods.lgfedavg`. Novel clients are not served, as they would need labels to train a
body."""

from collections.abc import Sequence

from clients.core.arrays import Arrays
from clients.methods.lgfedavg import OWN_BODIES, SHARED_LAYERS, prefixes
from strategies.core.replies import Node, Requirement
from strategies.methods._two_phases import TwoPhases


class LGFedAvg(TwoPhases):
    """Rounds of FedAvg, then of the `shared_layers` alone."""

    phase_key = OWN_BODIES
    requires = Requirement(
        "lg-fedavg", "keep a body of their own under a shared head", offers=("personal-body",)
    )

    shared_layers = SHARED_LAYERS

    def travels(self, name: str) -> bool:
        """Only the shared layers."""
        return name.startswith(prefixes(self.shared_layers))

    def initialize(self, arrays: Arrays) -> Arrays:
        """The initial model. Raises ValueError if it lacks a shared layer."""
        for prefix in prefixes(self.shared_layers):
            if not any(name.startswith(prefix) for name in arrays):
                raise ValueError(
                    f"lg-fedavg needs a model with {prefix!r} arrays, not {list(arrays)}; "
                    f"use `{LGFedAvg.requires.usage}`"
                )
        return arrays

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The shared layers for clients that have a body, else the whole model."""
        return self.by_node(arrays, nodes)
