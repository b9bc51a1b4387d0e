"""Local training: every client trains alone, nothing is shared."""

from clients.base import Client
from clients.protocol import StateUse


class LocalClient(Client):
    """The whole model is personal."""

    personal = ("",)
    needs_state = StateUse.PREDICTIONS
