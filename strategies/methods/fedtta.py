"""FedTTA's server (Ye et al., UPFL, Algorithm 1): the mean of ψ and of φ.

The paper prints the plain mean; its authors' code weighs the clients by their samples."""

from clients.core.arrays import Arrays
from fedapps.common.settings import setting
from strategies.core.replies import Requirement, Update
from strategies.methods.fedavg import FedAvg

BASE = "base."  # names of ψ on the wire


class FedTTA(FedAvg):
    """ψ ← Σ_i p_i ψ_i, φ ← Σ_i p_i φ_i: p_i = 1/M ("uniform") or n_i / Σ n ("samples")."""

    requires = Requirement(
        "fedtta",
        "meta-learn, and adapt their model without labels",
        offers=("adaptation",),
        fallback="the mean of the clients' models, unweighted or by samples",
    )
    limit_groups = (BASE,)
    protected_update_ratio = 2.0  # lengths differ less than with other methods
    weighting = setting("uniform", "how clients weigh in the server's mean", ("uniform", "samples"))

    def global_model(self) -> Arrays:
        """f(·; ψ), un-adapted, under the target network's names."""
        base = {}
        for name, array in self.arrays.items():
            if name.startswith(BASE):
                base[name.removeprefix(BASE)] = array
        return base or super().global_model()  # without a base model, clients do not adapt

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean of the clients' models."""
        if self.weighting == "samples":
            return super().aggregate(arrays, updates)
        return self.mean(arrays, updates, [1.0] * len(updates))
