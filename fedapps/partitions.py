"""Data of clients, under the name that an installed package and a checkout share.

An installed package has the folder `partitions` in this place."""

import partitions

__all__ = partitions.__all__


def __getattr__(name: str) -> object:
    return getattr(partitions, name)
