"""Two phases in one run: FedAvg of all arrays, then of some of them alone."""

from collections.abc import Sequence
from typing import Any

from clients.core.arrays import Arrays
from fedapps.common.settings import ROUNDS, setting
from strategies.core.replies import Node, Update
from strategies.methods.fedavg import FedAvg


class TwoPhases(FedAvg):
    """Up to round `fedavg_rounds` every name travels both ways; then those that `travels` names,
    and the rest once to each client that may lack it. Of the rest the server keeps FedAvg's last.

    Every message holds the phase under `phase_key`. The reported round is one of the second phase.
    A client is sent the rest again after a message that it did not answer."""

    persistent_attributes: tuple[str, ...] = ("begun", "started")
    phase_key = ""

    fedavg_rounds = setting(20, "rounds of FedAvg before the second phase", ROUNDS)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.begun = False  # the second phase
        self.started: set[int] = set()  # clients that have the rest

    @classmethod
    def travels(cls, name: str) -> bool:
        """Whether the array `name` travels in the second phase."""
        raise NotImplementedError

    @property
    def in_second(self) -> bool:
        """Whether this is the second phase. Runs that were saved before hold only `started`."""
        return self.begun or bool(self.started) or self.round > self.fedavg_rounds

    @property
    def may_stop(self) -> bool:
        """Not in the first phase."""
        return self.in_second

    def part(self, arrays: Arrays) -> Arrays:
        """What travels in the second phase."""
        return {name: a for name, a in arrays.items() if self.travels(name)}

    def by_node(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The part that travels for clients that have the rest, else all."""
        part = self.part(arrays)
        return {node: part if node.client in self.started else arrays for node in nodes}

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """As `by_node`; notes the phase, from which the reported round is chosen."""
        self.begun = self.in_second
        self.selection_phase, sent = int(self.begun), self.by_node(arrays, nodes)
        self.started -= {node.client for node in nodes}  # until they reply
        return sent

    def expected(self, sent: Arrays) -> Arrays:
        """All that was sent; in the second phase only the part that travels."""
        return self.part(sent) if self.in_second else sent

    def message_config(self) -> dict[str, Any]:
        """With the phase."""
        return super().message_config() | {self.phase_key: self.in_second}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean of what the clients sent; they have the rest."""
        if self.in_second:
            self.started |= {update.node.client for update in updates}
        return arrays | super().aggregate(arrays, updates)
