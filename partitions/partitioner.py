"""The former place of these names, kept for one release: import them from `fedapps.partitions`."""

from partitions.rules.partitioner import RowsPartitioner

__all__ = ["RowsPartitioner"]
