"""FedTTA's server (Ye et al., UPFL, Algorithm 1): the unweighted mean of ψ and of φ."""

from clients.arrays import Arrays
from strategies.fedavg import FedAvg
from strategies.replies import Update


class FedTTA(FedAvg):
    """ψ ← (1/M) Σ_i ψ_i, φ ← (1/M) Σ_i φ_i: every client counts the same."""

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The plain mean of the clients' models."""
        return self.mean(arrays, updates, [1.0] * len(updates))
