"""FedRep server (Collins et al., ICML 2021, Algorithm 1): FedAvg's mean of the bodies.

The heads stay with their clients, or the server holds them (see
`strategies.methods._server_heads`)."""

from clients.core.arrays import Arrays
from strategies.core.replies import Requirement, Update
from strategies.methods._server_heads import HeldHeads
from strategies.methods.fedavg import FedAvg


class FedRep(HeldHeads, FedAvg):
    """φ ← Σ_i (n_i / n) φ_i; Algorithm 1 prints the plain mean.

    If the server holds the heads, it replaces each by its client's trained head."""

    requires = Requirement(
        "fedrep",
        "train their head first and keep it",
        offers=("personal-head",),
        fallback="FedAvg",
    )

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean body, and the trained heads."""
        return super().aggregate(arrays, self.shared(updates)) | self.stored(arrays, updates)
