"""FLowDUP's server (Zakerinia, Scott and Lampert, ICML 2026): ψ follows the changes of training
clients with and without labels, see `clients.methods.flowdup`.

Clients with labels train on L + λ Ω, the others on λ Ω. L is the mean over clients with labels, Ω
the mean over all clients: ψ ← ψ + Σ_labeled n_i Δψ_i / N_labeled + Σ_unlabeled n_i Δψ_i / N. A mean
over all clients would divide L, and with it the steps, by N / N_labeled. This rule is ours, since
no text was available; the labeled clients' Ω has the weight 1 / N_labeled as well."""

from clients.core.arrays import Arrays, as_type
from strategies.core.replies import Update
from strategies.methods.fedavg import FedAvg


class FLowDUP(FedAvg):
    """FedAvg whose training clients may lack labels; if none does, it is FedAvg."""

    trains_unlabeled = True

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean over the labeled clients, plus the change by the others times their share."""
        labeled = [update for update in updates if not update.node.unlabeled]
        unlabeled = [update for update in updates if update.node.unlabeled]
        if not labeled or not unlabeled:
            return super().aggregate(arrays, updates)
        labeled_mean = super().aggregate(arrays, labeled)
        unlabeled_mean = super().aggregate(arrays, unlabeled)
        # Σ_unlabeled n_i Δψ_i / N is the mean of their changes times their part of N.
        num_unlabeled = sum(update.num_examples for update in unlabeled)
        num_all = sum(update.num_examples for update in updates)
        moved = {}
        for name, array in labeled_mean.items():
            mean_change = unlabeled_mean[name].astype(float) - arrays[name]
            moved[name] = as_type(array + num_unlabeled / num_all * mean_change, array.dtype)
        return moved
