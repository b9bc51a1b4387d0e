"""LG-FedAvg client (Liang et al., 2020): a personal body under a shared head.

In the first phase it is FedAvg's client and sends the whole model. In the second phase, which the
server starts, the body stays on the client. The first message of this phase contains the body once
more, and the state keeps it."""

from torch import nn

from clients.core.arrays import Arrays, group, prefixed
from clients.core.client import Client, Config, Metrics
from clients.core.protocol import StateUse
from clients.models.roles import frozen_names
from partitions.datasets.loading import Info

HEAD = "head."
OWN_BODIES = "own-bodies"  # key of a train message's config: true in the second phase


class LGFedAvgClient(Client):
    """Replies with the whole model in the first phase, with only the head in the second."""

    any_optimizer = True
    offers = ("personal-body",)
    needs_state = StateUse.PREDICTIONS
    needs_head = True
    head_by_name = True
    separately_trained = (HEAD,)

    @classmethod
    def build(cls, model: nn.Module, info: Info) -> nn.Module:
        """The network itself. Raises ValueError if no parameter of its body is trained."""
        body = [name for name, _ in model.named_parameters() if not name.startswith(HEAD)]
        if not frozen_names(model).issuperset(body):
            return model
        lacks = f"{', '.join(body):.300} are frozen" if body else "it has only the head"
        raise ValueError(
            f"lg-fedavg trains a body of {type(model).__name__} for each client, but {lacks}; "
            "choose a network with a body that is trained, or fedavg"
        )

    def load(self, arrays: Arrays) -> None:
        """Set the received head on the personal body, or at first the whole received model.

        Raises ValueError if there is no body."""
        head = {name: a for name, a in arrays.items() if name.startswith(HEAD)}
        personal = group(self.state, "personal")
        if not personal and len(head) == len(arrays):
            raise ValueError("the body, which the server sent once, is not in the state")
        super().load(head if personal else arrays)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local training of body and head."""
        reply, n, metrics = super().train(arrays, config)
        if not config.get(OWN_BODIES):
            return reply, n, metrics
        body = {name: a for name, a in reply.items() if not name.startswith(HEAD)}
        self.state |= prefixed("personal", body)
        head = {name: a for name, a in reply.items() if name.startswith(HEAD)}
        return head, n, metrics
