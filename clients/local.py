"""Local training: every client alone, nothing is shared."""

from clients.base import Client


class LocalClient(Client):
    """The whole model is personal."""

    personal = ("",)
    needs_state = "predictions"
