"""FedAvg (McMahan et al., AISTATS 2017, Algorithm 1): the mean weighted by sample counts.

The server's half of FedAvg, FedProx, FedPer, TENT and Local as well; they differ on the client."""

from collections.abc import Sequence
from logging import WARNING

import numpy as np
from flwr.common.logger import log

from clients.arrays import Arrays, as_type, is_statistic
from partitions.settings import setting
from strategies.base import PersonalizedStrategy
from strategies.replies import Update
from strategies.robust import ROBUST, is_plain, robust_mean


def weighted_mean(arrays: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Σ_i p_i w_i with p_i = n_i / Σ n, name by name, in the arrays' dtypes and shapes.

    Means of integers and booleans are rounded (see `clients.arrays.as_type`)."""
    total = float(sum(weights))
    shares = [weight / total for weight in weights]
    mean = {}
    for name, first in arrays[0].items():
        out = np.zeros(first.shape, first.dtype if first.dtype.kind == "f" else np.float64)
        for client, share in zip(arrays, shares, strict=True):
            out += client[name] * out.dtype.type(share)
        mean[name] = as_type(out, first.dtype)
    return mean


def mean(arrays: Sequence[Arrays]) -> Arrays:
    """The unweighted mean, name by name."""
    return weighted_mean(arrays, [1.0] * len(arrays))


def mean_statistics(updates: Sequence[Update]) -> Arrays:
    """The mean of the running statistics and counters, weighted by sample counts."""
    statistics = [{n: a for n, a in u.arrays.items() if is_statistic(n, a)} for u in updates]
    return weighted_mean(statistics, [u.num_examples for u in updates])


class FedAvg(PersonalizedStrategy):
    """w ← Σ_i (n_i / n) w_i over the round's valid replies.

    `robust` replaces the mean by one that tolerates `robust_fraction` of malicious clients and
    ignores sample counts: "median", "trimmed-mean" or "krum", see `strategies.robust`."""

    robust = setting("none", "what stands in for the mean, against clients that lie", ROBUST)
    robust_fraction = setting(0.2, "share of the clients that it presumes to lie", "[0, 0.5)")

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean weighted by sample counts."""
        return self.mean(arrays, updates, [u.num_examples for u in updates])

    def mean(self, arrays: Arrays, updates: list[Update], weights: Sequence[float]) -> Arrays:
        """The weighted mean of the clients' models, or the robust one."""
        models = [update.arrays for update in updates]
        if self.robust == "none":
            return weighted_mean(models, weights)
        if plain := is_plain(self.robust, self.robust_fraction, len(models)):
            log(WARNING, "round %s: %s", self.round, plain)
        return robust_mean(self.robust, self.robust_fraction, arrays, models)
