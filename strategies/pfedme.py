"""pFedMe server (Dinh, Tran and Nguyen, NeurIPS 2020, Algorithm 1).

w ← (1 − β) w + β mean_i w_i over the sampled clients. Running statistics are averaged."""

from typing import Any

from clients.arrays import Arrays
from strategies.base import PersonalizedStrategy
from strategies.fedavg import mean, mean_statistics
from strategies.replies import Update


class PFedMe(PersonalizedStrategy):
    """`server_beta` is β > 0; 1 is the plain mean, more than 1 extrapolates."""

    def __init__(self, *, server_beta: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        if server_beta <= 0:
            raise ValueError(f"pfedme.server-beta is {server_beta}; it must be positive")
        self.server_beta = server_beta

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """(1 − β) w + β mean_i w_i."""
        average = mean([update.arrays for update in updates])
        beta = self.server_beta
        mixed = {name: (1 - beta) * w + beta * average[name] for name, w in arrays.items()}
        return mixed | mean_statistics(updates)
