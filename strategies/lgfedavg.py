"""LG-FedAvg server (Liang et al., 2020): FedAvg of the whole model, then of the head alone.

Both phases are one run, and a run that goes on from one in its second phase is in it from the
beginning. Names on the wire: up to round `fedavg_rounds` every name both ways; after it the head
both ways, and the body of FedAvg's last model once to each client that has none yet; every message
tells the phase. The round that is reported is one of the second phase. A novel client would need
labels to train a body: not served."""

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
        self.started: set[int] = set()  # ids of the clients that have a body of their own

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
        """The same; of this round's phase one round is reported."""
        self.phase = int(self.own_bodies)
        return self.personalize(arrays, nodes)

    def expected(self, sent: Arrays) -> Arrays:
        """All that was sent, in the second phase the head of it."""
        if not self.own_bodies:
            return sent
        return {name: a for name, a in sent.items() if name.startswith(HEAD)}

    def message_config(self, later: int = 0) -> dict[str, Any]:
        """With the phase."""
        return super().message_config(later) | {OWN_BODIES: self.own_bodies}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """The weighted mean of what the clients share."""
        if self.own_bodies:
            self.started |= {update.node.client for update in updates}
        return arrays | super().aggregate(arrays, updates)
