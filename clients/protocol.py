"""The former place of these names, kept for one release: import them from `fedapps.clients`."""

from clients.core.protocol import FewShot, StateUse

__all__ = ["FewShot", "StateUse"]
