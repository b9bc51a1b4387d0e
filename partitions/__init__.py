"""Which samples belong to which client."""

from partitions.chosen import federation, task
from partitions.federation import Federation

__all__ = ["Federation", "federation", "task"]
