"""FedAvg (McMahan et al., AISTATS 2017, Algorithm 1): the mean weighted by sample counts.

FedProx, FedPer, TENT and Local have the same server; they differ on the client."""

from collections.abc import Sequence
from logging import WARNING

from flwr.common.logger import log

from clients.core.arrays import Arrays
from fedapps.common.settings import setting
from strategies.core.aggregation import ROBUST, is_plain, robust_mean, weighted_mean
from strategies.core.replies import Update
from strategies.core.strategy import PersonalizedStrategy


class FedAvg(PersonalizedStrategy):
    """w ← Σ_i (n_i / n) w_i over the round's valid replies.

    `robust` replaces the mean by one that tolerates `robust_fraction` of malicious clients and
    ignores sample counts: "median", "trimmed-mean" or "krum", see `strategies.core.aggregation`."""

    uses_late_replies = True
    robust = setting("none", "Byzantine-robust aggregation rule in place of the mean", ROBUST)
    robust_fraction = setting(
        0.2, "share of malicious clients that the rule tolerates", "[0, 0.5)", beside="robust!=none"
    )

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean weighted by sample counts."""
        return self.mean(arrays, updates, [update.num_examples for update in updates])

    def mean(self, arrays: Arrays, updates: list[Update], weights: Sequence[float]) -> Arrays:
        """The weighted mean of the clients' models, or the robust one."""
        models = [update.arrays for update in updates]
        if self.robust == "none":
            return weighted_mean(models, weights)
        reason = is_plain(self.robust, self.robust_fraction, len(models))
        if reason:
            log(WARNING, "round %s: %s", self.round, reason)
        return robust_mean(self.robust, self.robust_fraction, arrays, models)
