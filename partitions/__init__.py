"""Which samples belong to which client."""

from partitions.federation import Federation, federation

__all__ = ["Federation", "federation"]
