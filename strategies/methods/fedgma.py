"""FedGMA, gradient-masked averaging (Tenison et al., 2022, Algorithm 1).

A = |mean_i sign(Δ_i)|; mask 1 where A ≥ τ, else A; w ← w + η_g mask ⊙ mean(Δ_i), entry by entry.
Departs from the paper: running statistics are averaged. Needs no special client. Novel clients
get the global model."""

import numpy as np

from clients.core.arrays import Arrays, is_statistic, wide
from fedapps.common.settings import POSITIVE, SHARE, setting
from strategies.core.aggregation import mean_statistics
from strategies.core.replies import Update
from strategies.core.strategy import PersonalizedStrategy


def mask(deltas: np.ndarray, tau: float) -> np.ndarray:
    """The mask (*shape) of the updates (clients, *shape) for the agreement threshold τ."""
    agreement = np.abs(np.sign(deltas).mean(0))  # A ∈ [0, 1]
    return np.where(agreement >= tau, np.ones_like(agreement), agreement)


class FedGMA(PersonalizedStrategy):
    """`server_lr` is η_g, `agreement` is τ in [0, 1]."""

    treats_statistics_apart = True
    uses_late_replies = True

    server_lr = setting(1.0, "η_g", POSITIVE)
    agreement = setting(0.1, "τ: damp an entry if the clients agree less on its sign", SHARE)

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """w + η_g mask ⊙ mean(Δ_i)."""
        moved = {}
        for name, w in arrays.items():
            if is_statistic(name, w):
                continue
            deltas = np.stack([wide(update.arrays[name]) - w for update in updates])
            step = self.decay * self.server_lr * mask(deltas, self.agreement) * deltas.mean(0)
            moved[name] = w + step.astype(w.dtype)
        return moved | mean_statistics(updates)
