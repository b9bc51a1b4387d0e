"""ATP server (Bao, Wei, Wang and He, NeurIPS 2023): FedAvg, then rates of adaptation.

A run that starts from another method's model begins with the second phase. Names on the wire: in
the first phase every name both ways; then `adaptation_rates` α both ways, and the network once to
each client. A run that is resumed without the clients' states sends the network again.
α ← the plain mean of the replies; with `protect` without the largest and the smallest tenth of each
rate, one at least. Evaluated clients, also novel ones, get the network and α."""

from collections.abc import Mapping, Sequence
from typing import Any

from clients.core.arrays import Arrays
from clients.methods.atp import LEARN_RATES, RATES
from strategies.core.aggregation import robust_mean
from strategies.core.count_limits import num_trimmed
from strategies.core.limits import MIN_REPLIES_FOR_NORMS
from strategies.core.replies import Requirement, Update
from strategies.methods._two_phases import TwoPhases


class ATP(TwoPhases):
    """Rounds of FedAvg, then of the rates alone; the server keeps the network."""

    phase_key = LEARN_RATES
    fedavg_share = 0.8
    requires = Requirement(
        "atp", "learn rates of adaptation for a fixed network", offers=("adaptation-rates",)
    )

    def travels(self, name: str) -> bool:
        """Only the rates."""
        return name == RATES

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """As FedAvg; a model without rates begins the second phase, with rates of 0."""
        if RATES not in saved:
            self.begun = True
            saved = {**saved, RATES: arrays[RATES]}
        return super().restore(arrays, saved)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As the base. A client whose state is not restored may have lost the network."""
        super().load_state(state)
        self.begun = self.in_second
        self.started &= self.former_clients.keys()

    def mean(self, arrays: Arrays, updates: list[Update], weights: Sequence[float]) -> Arrays:
        """FedAvg's mean of the networks, or the plain mean of the rates."""
        if not self.in_second:
            return super().mean(arrays, updates, weights)
        if self.trims and len(updates) >= MIN_REPLIES_FOR_NORMS:
            # Half a client more, so that no rounding leaves one less out.
            fraction = (num_trimmed(len(updates)) + 0.5) / len(updates)
            return robust_mean("trimmed-mean", fraction, arrays, [u.arrays for u in updates])
        return super().mean(arrays, updates, [1.0] * len(updates))

    @property
    def trims(self) -> bool:
        """Whether the largest and the smallest rates do not count."""
        return self.max_update_ratio > 0 and self.robust == "none"
