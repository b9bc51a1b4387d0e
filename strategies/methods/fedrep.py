"""FedRep server (Collins et al., ICML 2021, Algorithm 1): FedAvg's mean of the bodies.

The heads stay with their clients, or the server holds them (see
`strategies.methods._server_heads`)."""

from clients.core.arrays import Arrays
from strategies.core.replies import Requirement, Update
from strategies.methods._server_heads import HeldHeads
from strategies.methods.fedavg import FedAvg


class FedRep(HeldHeads, FedAvg):
    """φ ← Σ_i (n_i / n) φ_i, in Algorithm 1 the plain mean.

    A head that the server holds becomes its client's trained one."""

    requires = Requirement(
        "fedrep",
        "train their head first and keep it",
        offers=("personal-head",),
        fallback="FedAvg",
    )

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean body, and the trained heads."""
        return super().aggregate(arrays, self.shared(updates)) | self.stored(arrays, updates)
