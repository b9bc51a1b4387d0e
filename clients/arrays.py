"""The former place of these names, kept for one release: import them from `fedapps.clients`."""

from clients.core.arrays import Arrays, group, model_arrays, prefixed

__all__ = ["Arrays", "group", "model_arrays", "prefixed"]
