"""pFedMe server (Dinh, Tran and Nguyen, NeurIPS 2020, Algorithm 1).

w ← (1 − β) w + β mean_i w_i over the sampled clients, a plain mean as in the paper; the authors'
code weighs by samples. Departs from the paper: only sampled clients train, while in Algorithm 1 the
others find their θ_i too. Running statistics are averaged. With heads on the server, as FedEmbed
(Silva et al., 2022, section 4.1) describes it, only the heads are personal, "regularized to
minimize parameter difference from a global model head". The default limits of replies do not
protect it from one liar of ten (docs/reference/failures.md)."""

from clients.core.arrays import Arrays, is_statistic, prefixed
from clients.methods.pfedme import HEAD, PERSONAL
from fedapps.common.settings import POSITIVE, setting
from strategies.core.aggregation import mean_statistics
from strategies.core.replies import Requirement, Update
from strategies.methods._server_heads import HeldHeads
from strategies.methods.fedavg import FedAvg


class PFedMe(HeldHeads, FedAvg):
    """`heads` says who holds the personal parts: the "client" θ_i, or the "server" the heads.
    `server_beta` is β > 0; 1 is the plain mean, more than 1 extrapolates."""

    treats_statistics_apart = True
    head = f"{PERSONAL}/"
    requires = Requirement(
        "pfedme",
        "keep a personal model near the server's",
        offers=("near-model",),
        fallback="(1 - beta) w + beta times the unweighted mean of the clients' models",
    )

    server_beta = setting(1.0, "β; more than 1 extrapolates the mean of the clients", POSITIVE)

    def initialize(self, arrays: Arrays) -> Arrays:
        """w; the personal heads start as its head."""
        if not self.server_holds_heads:
            return super().initialize(arrays)
        head = {name: a for name, a in arrays.items() if name.startswith(HEAD)}
        return super().initialize(arrays | prefixed(PERSONAL, head))

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """(1 − β) w + β mean_i w_i."""
        shared = self.shared(updates)
        beta = self.server_beta
        average = self.mean(arrays, shared, [1.0] * len(shared))
        mixed = {name: (1 - beta) * arrays[name] + beta * a for name, a in average.items()}
        # Statistics are averaged by sample counts, which the robust means ignore.
        if self.robust == "none":
            statistics = mean_statistics(shared)
        else:
            statistics = {name: a for name, a in average.items() if is_statistic(name, a)}
        return mixed | self.stored(arrays, updates) | statistics
