"""LG-FedAvg client (Liang et al., 2020): a body of its own under a head that all share.

For the first `fedavg_rounds` rounds it is FedAvg's client and the whole model travels. From then
on the body stays: it comes once more with the server's message that starts the second phase for
this client, is kept in the state, and never leaves."""

from typing import Any

from clients.arrays import Arrays, group, prefixed
from clients.base import Client, Config, Metrics

HEAD = "head."


class LGFedAvgClient(Client):
    """Replies with the whole model up to round `fedavg_rounds`, with the head alone after it."""

    needs_state = "predictions"
    needs_head = True

    def __init__(self, *args: Any, fedavg_rounds: int = 20, **options: Any) -> None:
        super().__init__(*args, **options)
        if fedavg_rounds < 0:
            raise ValueError(f"lg-fedavg.fedavg-rounds is {fedavg_rounds}; it must be at least 0")
        self.fedavg_rounds = fedavg_rounds

    def receive(self, arrays: Arrays, config: Config) -> None:
        """The server's head on the client's own body, once it has one."""
        if group(self.state, "personal"):
            arrays = {name: a for name, a in arrays.items() if name.startswith(HEAD)}
        super().receive(arrays, config)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local training of body and head; a body that is not sent comes from the state."""
        reply, n, metrics = super().train(arrays, config)
        if int(config.get("server-round", 0)) <= self.fedavg_rounds:
            return reply, n, metrics
        body = {name: a for name, a in reply.items() if not name.startswith(HEAD)}
        self.state |= prefixed("personal", body)
        return {name: a for name, a in reply.items() if name.startswith(HEAD)}, n, metrics
