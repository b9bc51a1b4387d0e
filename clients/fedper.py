"""FedPer (Arivazhagan et al., 2019): a shared body, and a head that stays on the client."""

from clients.base import Client
from clients.protocol import StateUse
from partitions.settings import setting

HEADS = setting("client", "who holds personal heads", ("client", "server"))


class FedPerClient(Client):
    """The last linear layer is personal: trained locally, kept between rounds, never sent."""

    needs_head = True
    personal = ("head.",)
    needs_state = StateUse.PREDICTIONS

    def is_tuned(self, name: str) -> bool:
        """A novel client trains its own head under the shared body."""
        return self.is_personal(name)
