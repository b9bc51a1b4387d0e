"""The former place of these names, kept for one release: import them from `fedapps.partitions`."""

from fedapps.common.settings import WEIGHT, setting

__all__ = ["WEIGHT", "setting"]
