"""Which samples belong to which client."""

from partitions.federation import Federation, federation, task

__all__ = ["Federation", "federation", "task"]
