"""LG-FedAvg server (Liang et al., 2020): FedAvg of the whole model, then of the head alone.

Both phases are one run; a run that continues a second phase starts in it. Names on the wire: up to
round `fedavg_rounds` every name both ways, then the head both ways, and once the body of FedAvg's
last model to each client that has none. Every message holds the phase. The reported round is one
of the second phase. Novel clients are not served, as they would need labels to train a body."""

from collections.abc import Sequence
from typing import Any

from clients.arrays import Arrays
from clients.lgfedavg import HEAD, OWN_BODIES
from partitions.settings import ROUNDS, setting
from strategies.fedavg import FedAvg
from strategies.replies import Node, Requirement, Update


class LGFedAvg(FedAvg):
    """`fedavg_rounds` rounds of FedAvg, then the head alone; the server keeps FedAvg's body."""

    kept = ("started",)
    requires = Requirement(
        "lg-fedavg", "keep a body of their own under a shared head", offers=("personal-body",)
    )

    fedavg_rounds = setting(20, "rounds of FedAvg before the body becomes personal", ROUNDS)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.started: set[int] = set()  # clients that have a personal body

    @property
    def own_bodies(self) -> bool:
        """Whether the second phase has begun."""
        return bool(self.started) or self.round > self.fedavg_rounds

    @property
    def may_stop(self) -> bool:
        """Not before the bodies have become personal."""
        return self.own_bodies

    def initialize(self, arrays: Arrays) -> Arrays:
        """The initial model. Raises ValueError if it has no head."""
        if not any(name.startswith(HEAD) for name in arrays):
            raise ValueError(
                f"lg-fedavg needs a model with {HEAD!r} arrays, not {list(arrays)}; "
                f"use `{LGFedAvg.requires.usage}`"
            )
        return arrays

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The head for clients that have a body, else the whole model."""
        head = {name: a for name, a in arrays.items() if name.startswith(HEAD)}
        return {node: head if node.client in self.started else arrays for node in nodes}

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The same; notes the phase, from which the reported round is chosen."""
        self.phase = int(self.own_bodies)
        return self.personalize(arrays, nodes)

    def expected(self, sent: Arrays) -> Arrays:
        """All that was sent; in the second phase only the head."""
        if not self.own_bodies:
            return sent
        return {name: a for name, a in sent.items() if name.startswith(HEAD)}

    def message_config(self) -> dict[str, Any]:
        """With the phase."""
        return super().message_config() | {OWN_BODIES: self.own_bodies}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The weighted mean of what the clients share."""
        if self.own_bodies:
            self.started |= {update.node.client for update in updates}
        return arrays | super().aggregate(arrays, updates)
