"""pFedMe server (Dinh, Tran and Nguyen, NeurIPS 2020, Algorithm 1).

w ← (1 − β) w + β mean_i w_i over the sampled clients. Running statistics are averaged."""

from typing import Any

from clients.arrays import Arrays, is_statistic
from strategies.fedavg import FedAvg, mean_statistics
from strategies.replies import Update


class PFedMe(FedAvg):
    """`server_beta` is β > 0; 1 is the plain mean, more than 1 extrapolates."""

    def __init__(self, *, server_beta: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        if server_beta <= 0:
            raise ValueError(f"pfedme.server-beta is {server_beta}; it must be positive")
        self.server_beta = server_beta

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """(1 − β) w + β mean_i w_i."""
        average = self.mean(arrays, updates, [1.0] * len(updates))
        beta = self.server_beta
        mixed = {name: (1 - beta) * w + beta * average[name] for name, w in arrays.items()}
        if self.robust != "none":
            return mixed | {name: a for name, a in average.items() if is_statistic(name)}
        return mixed | mean_statistics(updates)
