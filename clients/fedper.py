"""FedPer (Arivazhagan et al., 2019): a shared body, and a head that stays on the client."""

from clients.base import Client


class FedPerClient(Client):
    """The last linear layer is personal: trained locally, kept between rounds, never sent."""

    needs_head = True
    personal = ("head.",)
    needs_state = "predictions"
