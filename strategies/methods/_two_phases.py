"""Two phases in one run: FedAvg of all arrays, then of a part of them."""

from collections.abc import Sequence
from typing import Any

from clients.core.arrays import Arrays
from fedapps.common.settings import ROUNDS, SHARE, setting
from strategies.core.replies import Node, Update
from strategies.methods.fedavg import FedAvg


class TwoPhases(FedAvg):
    """The first phase takes `fedavg_rounds`, or the share `fedavg_share` of the run's rounds; every
    array travels both ways. Then only the arrays travel that `travels` accepts. Of the other arrays
    the server keeps FedAvg's last values.

    A client gets the other arrays once, and again after a message that it did not answer. Every
    message holds the phase under `phase_key`. The reported round is one of the second phase."""

    persistent_attributes: tuple[str, ...] = ("begun", "started")
    phase_key = ""

    # A late reply may be one of the other phase, with other names.
    uses_late_replies = False

    fedavg_rounds = setting(
        0, "rounds of FedAvg before the second phase; 0: by fedavg-share", ROUNDS
    )
    fedavg_share = setting(
        0.5, "share of the run's rounds that FedAvg takes", SHARE, beside="fedavg-rounds=0"
    )

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.begun = False  # whether the second phase has begun
        self.started: set[int] = set()  # ids of the clients that have the other arrays

    def travels(self, name: str) -> bool:
        """Whether the array `name` travels in the second phase."""
        raise NotImplementedError

    @property
    def first_rounds(self) -> int:
        """The rounds of the first phase. A share above 0 is rounded down, but is at least one."""
        if self.fedavg_rounds or not self.fedavg_share:
            return self.fedavg_rounds
        return max(1, int(self.fedavg_share * self.num_rounds))

    @property
    def in_second(self) -> bool:
        """Whether this is the second phase."""
        # Checkpoints of earlier versions hold `started` and no `begun`.
        return self.begun or bool(self.started) or self.round > self.first_rounds

    @property
    def may_stop(self) -> bool:
        """Not in the first phase."""
        return self.in_second

    def part(self, arrays: Arrays) -> Arrays:
        """The arrays that travel in the second phase."""
        return {name: a for name, a in arrays.items() if self.travels(name)}

    def by_node(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The part that travels for clients that have the other arrays; all arrays for others."""
        part = self.part(arrays)
        payloads = {}
        for node in nodes:
            payloads[node] = part if node.client in self.started else arrays
        return payloads

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """As `by_node`; the second phase begins here, and the reported round is one of it."""
        self.begun = self.in_second
        self.selection_phase = int(self.begun)
        payloads = self.by_node(arrays, nodes)
        self.started -= {node.client for node in nodes}  # until they reply
        return payloads

    def expected(self, sent: Arrays) -> Arrays:
        """All that was sent; in the second phase only the part that travels."""
        return self.part(sent) if self.in_second else sent

    def message_config(self) -> dict[str, Any]:
        """With the phase."""
        return super().message_config() | {self.phase_key: self.in_second}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The mean of the clients' arrays; from here on they have the other arrays."""
        if self.in_second:
            self.started |= {update.node.client for update in updates}
        return arrays | super().aggregate(arrays, updates)
