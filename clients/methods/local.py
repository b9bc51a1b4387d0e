"""Local training: every client trains alone, nothing is shared."""

from clients.core.client import Client
from clients.core.protocol import StateUse


class LocalClient(Client):
    """The whole model is personal."""

    personal = ("",)
    needs_state = StateUse.PREDICTIONS
