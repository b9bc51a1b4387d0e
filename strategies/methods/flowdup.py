"""FLowDUP's server (Zakerinia, Scott and Lampert, ICML 2026): ψ moves by what training clients with
and without labels learn, see `clients.methods.flowdup`.

Clients with labels train on L + λ Ω, the others on λ Ω. L is the mean over clients with labels, Ω
one over all clients: ψ ← ψ + Σ_labeled n_i Δψ_i / N_labeled + Σ_unlabeled n_i Δψ_i / N. A mean
over all clients would divide L, and with it the steps, by N / N_labeled. Ours, as no text was
available; the labeled clients' Ω counts with 1 / N_labeled as well."""

from clients.core.arrays import Arrays, as_type
from strategies.core.replies import Update
from strategies.methods.fedavg import FedAvg


class FLowDUP(FedAvg):
    """FedAvg whose training clients may lack labels; if none does, it is FedAvg."""

    trains_unlabeled = True

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean over the labeled clients, plus the change by the others times their share."""
        labeled = [update for update in updates if not update.node.unlabeled]
        others = [update for update in updates if update.node.unlabeled]
        if not labeled or not others:
            return super().aggregate(arrays, updates)
        share = sum(u.num_examples for u in others) / sum(u.num_examples for u in updates)
        mean, rest = super().aggregate(arrays, labeled), super().aggregate(arrays, others)
        return {
            name: as_type(a + share * (rest[name].astype(float) - arrays[name]), a.dtype)
            for name, a in mean.items()
        }
