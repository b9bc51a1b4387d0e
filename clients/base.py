"""The former place of these names, kept for one release: import them from `fedapps.clients`."""

from clients.core.client import Client, Config, Metrics

__all__ = ["Client", "Config", "Metrics"]
