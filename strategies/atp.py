"""ATP server (Bao, Wei, Wang and He, NeurIPS 2023): FedAvg, then rates of adaptation.

Both phases are one run. A run that starts from another method's model has FedAvg behind it. Names
on the wire: up to round `fedavg_rounds` every name both ways; then `adaptation_rates` α both ways,
and the network once to each client that has none. α ← the plain mean of the replies. Every message
holds the phase. The reported round is one of the second phase. Evaluated clients, novel ones
included, get the network and α."""

from collections.abc import Sequence
from typing import Any

from clients.arrays import Arrays
from clients.atp import LEARN_RATES, RATES
from partitions.settings import ROUNDS, setting
from strategies.fedavg import FedAvg
from strategies.replies import Node, Requirement, Update


class ATP(FedAvg):
    """`fedavg_rounds` rounds of FedAvg, then the rates alone; the server keeps the network."""

    kept = ("started",)
    requires = Requirement(
        "atp", "learn rates of adaptation for a fixed network", offers=("adaptation-rates",)
    )

    fedavg_rounds = setting(20, "rounds of FedAvg before the rates are learnt", ROUNDS)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.started: set[int] = set()  # clients that have the final network

    @property
    def learns_rates(self) -> bool:
        """Whether the second phase has begun."""
        return bool(self.started) or self.round > self.fedavg_rounds

    @property
    def may_stop(self) -> bool:
        """Not before the rates are learnt."""
        return self.learns_rates

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """As FedAvg; a model without rates begins the second phase, with rates of 0."""
        if RATES not in saved:
            self.fedavg_rounds = 0
            saved = {**saved, RATES: arrays[RATES]}
        return super().restore(arrays, saved)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """α for clients that have the network, else all; notes the phase."""
        self.phase = int(self.learns_rates)
        alone = {RATES: arrays[RATES]}
        return {node: alone if node.client in self.started else arrays for node in nodes}

    def expected(self, sent: Arrays) -> Arrays:
        """All that was sent; in the second phase only α."""
        return {RATES: sent[RATES]} if self.learns_rates else sent

    def message_config(self) -> dict[str, Any]:
        """With the phase."""
        return super().message_config() | {LEARN_RATES: self.learns_rates}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """FedAvg's mean of the networks, or the plain mean of the rates."""
        if not self.learns_rates:
            return super().aggregate(arrays, updates)
        self.started |= {update.node.client for update in updates}
        return arrays | self.mean(arrays, updates, [1.0] * len(updates))
