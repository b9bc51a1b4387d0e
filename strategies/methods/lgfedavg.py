"""LG-FedAvg server (Liang et al., 2020): FedAvg of the whole model, then of the head alone.

A run that continues a second phase starts in it. Names on the wire: up to round `fedavg_rounds`
every name both ways, then the head both ways, and once the body of FedAvg's last model to each
client. A client that has a body keeps it. Departs from the authors' code: means are weighted by
sample counts, not equal. Novel clients are not served, as they would need labels to train a
body."""

from collections.abc import Sequence

from clients.core.arrays import Arrays
from clients.methods.lgfedavg import HEAD, OWN_BODIES
from strategies.core.replies import Node, Requirement
from strategies.methods._two_phases import TwoPhases


class LGFedAvg(TwoPhases):
    """`fedavg_rounds` rounds of FedAvg, then the head alone."""

    phase_key = OWN_BODIES
    requires = Requirement(
        "lg-fedavg", "keep a body of their own under a shared head", offers=("personal-body",)
    )

    @classmethod
    def travels(cls, name: str) -> bool:
        """Only the head."""
        return name.startswith(HEAD)

    def initialize(self, arrays: Arrays) -> Arrays:
        """The initial model. Raises ValueError if it has no head."""
        if not self.part(arrays):
            raise ValueError(
                f"lg-fedavg needs a model with {HEAD!r} arrays, not {list(arrays)}; "
                f"use `{LGFedAvg.requires.usage}`"
            )
        return arrays

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The head for clients that have a body, else the whole model."""
        return self.by_node(arrays, nodes)
