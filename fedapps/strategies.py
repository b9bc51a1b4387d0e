"""The strategies, under the name that an installed package and a checkout share.

An installed package has the folder `strategies` in this place."""

import strategies

__all__ = strategies.__all__


def __getattr__(name: str) -> object:
    return getattr(strategies, name)
