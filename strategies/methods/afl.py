"""AFL, agnostic federated learning (Mohri et al., ICML 2019, Stochastic-AFL).

min_w max_{λ ∈ simplex} Σ_i λ_i L_i(w): w is the mean of the clients' models weighted by λ,
then λ ← Π(λ + γ_λ L(w)). Departs from the paper: a client takes several local steps a round. With
partial participation the sampled clients redistribute their total weight among themselves, and the
others keep theirs, so λ stays on the simplex. Novel clients get the global model.
The default limits of replies do not protect the method where clients hold few classes: a liar with
a large risk gains weight (docs/reference/failures.md)."""

from typing import Any

import numpy as np

from clients.core.arrays import Arrays
from clients.core.simplex import project
from clients.methods.afl import RISK
from fedapps.common.settings import RATE, setting
from strategies.core.aggregation import weighted_mean
from strategies.core.limits import bounded_weights
from strategies.core.replies import Requirement, Update
from strategies.core.strategy import PersonalizedStrategy


class AFL(PersonalizedStrategy):
    """`mixture_lr` is γ_λ; γ_ω is the clients' lr. `mixture` holds λ by client id."""

    persistent_attributes = ("mixture",)
    requires = Requirement(
        "afl",
        "tell `risk`, their loss at the weights that they were sent",
        metrics=(RISK,),
        fallback="the unweighted mean of the clients' models",
    )

    mixture_lr = setting(0.001, "γ_λ, learning rate of the clients' mixture weights", RATE)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.mixture: dict[int, float] = {}  # λ

    def known_clients(self) -> set[int]:
        """Those with a weight λ."""
        return set(self.mixture)

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """w ← Σ_S λ_i w_i / Σ_S λ_i, then λ_S ← Π(λ_S + γ_λ L_S(w)) with the mass Σ_S λ_i."""
        self._add_newcomers()
        # w is the mean by λ before its step, as in the paper.
        weights = [self.mixture[update.node.client] for update in updates]
        self._ascend(updates)
        if sum(weights) == 0:  # the projection may set all of the sampled clients' weights to 0
            return arrays
        weights = bounded_weights(weights, updates, self.max_examples_ratio)
        return weighted_mean([update.arrays for update in updates], weights)

    def _ascend(self, updates: list[Update]) -> None:
        """λ_S ← Π(λ_S + γ_λ L_S(w)) over the clients S whose risk is a finite number."""
        risks = {}
        for update in updates:
            risk = update.metrics.get(RISK, np.nan)
            if np.isfinite(risk):
                risks[update.node.client] = risk
        if not risks:
            return
        before = np.array([self.mixture[client] for client in risks])
        ascent = before + self.decay * self.mixture_lr * np.array(list(risks.values()))
        after = project(ascent, before.sum())
        self.mixture |= dict(zip(risks, after.tolist(), strict=True))

    def report(self) -> dict[str, float]:
        """The largest and the least λ_i."""
        return {
            "mixture-max": max(self.mixture.values()),
            "mixture-min": min(self.mixture.values()),
        }

    def _add_newcomers(self) -> None:
        """New training clients get 1/N each; the weights of the others shrink accordingly."""
        newcomers = []
        for node in self.training_nodes():
            if node.client not in self.mixture:
                newcomers.append(node.client)
        count = len(self.mixture) + len(newcomers)
        shrink = len(self.mixture) / count  # the sum stays 1
        mixture = {client: shrink * weight for client, weight in self.mixture.items()}
        self.mixture = mixture | dict.fromkeys(newcomers, 1 / count)
