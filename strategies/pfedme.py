"""pFedMe server (Dinh, Tran and Nguyen, NeurIPS 2020, Algorithm 1).

w ← (1 − β) w + β mean_i w_i over the sampled clients. Running statistics are averaged. As FedEmbed
(Silva et al., 2022, section 4.1) describes it, what is personal are heads "regularized to minimize
parameter difference from a global model head": with those on the server, a client's model is w with
its own head."""

from clients.arrays import Arrays, is_statistic, prefixed
from clients.pfedme import HEAD, PERSONAL
from partitions.settings import POSITIVE, setting
from strategies.fedavg import FedAvg, mean_statistics
from strategies.heads import HeldHeads
from strategies.replies import Update
from strategies.requirement import Requirement


class PFedMe(HeldHeads, FedAvg):
    """`heads` is where the personal parts live: θ_i on its "client", or its head on the "server".
    `server_beta` is β > 0; 1 is the plain mean, more than 1 extrapolates."""

    head = f"{PERSONAL}/"
    requires = Requirement(
        "pfedme",
        "keep a personal model near the server's",
        offers=("near-model",),
        otherwise="(1 - beta) w + beta times the unweighted mean of the clients' models",
    )

    server_beta = setting(1.0, "β; more than 1 extrapolates the mean of the clients", POSITIVE)

    def initialize(self, arrays: Arrays) -> Arrays:
        """w; clients' own heads start as its head."""
        own = {n: a for n, a in arrays.items() if n.startswith(HEAD) and self.holds}
        return super().initialize(arrays | prefixed(PERSONAL, own))

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """(1 − β) w + β mean_i w_i."""
        shared, beta = self.shared(updates), self.server_beta
        average = self.mean(arrays, shared, [1.0] * len(shared))
        mixed = {name: (1 - beta) * arrays[name] + beta * a for name, a in average.items()}
        heads = self.stored(arrays, updates)
        if self.robust != "none":
            return mixed | heads | {name: a for name, a in average.items() if is_statistic(name, a)}
        return mixed | heads | mean_statistics(shared)
