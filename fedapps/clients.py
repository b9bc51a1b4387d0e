"""What an own client is made of, under the name that an installed package and a checkout share.

An installed package has the folder `clients` in this place."""

import clients

__all__ = clients.__all__


def __getattr__(name: str) -> object:
    return getattr(clients, name)
