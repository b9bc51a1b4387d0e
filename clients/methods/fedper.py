"""FedPer (Arivazhagan et al., 2019): a shared body, and a head that stays on the client."""

from clients.core.client import Client
from clients.core.protocol import StateUse


class FedPerClient(Client):
    """The last linear layer is personal: trained locally, kept between rounds, never sent."""

    needs_head = True
    head_by_name = True
    personal = ("head.",)
    needs_state = StateUse.PREDICTIONS

    def is_tuned(self, name: str) -> bool:
        """A novel client trains its own head under the shared body."""
        return self.is_personal(name)
