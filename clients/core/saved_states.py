"""Whether a client can go on from what it has kept of a saved run."""

from clients.core.arrays import Arrays

TAKE_THE_SAME = "take the data and the model of the saved run"


def check_kept(client: int, kept: Arrays, network: Arrays, *, complete: bool) -> None:
    """Raise ValueError if arrays that a client has `kept` have other names or shapes than those of
    its `network`; if they must be `complete`, also if some are missing."""
    different = kept.keys() - network.keys()
    if complete:
        different |= network.keys() - kept.keys()
    if different:
        raise ValueError(
            f"the arrays that client {client} has kept do not fit: {TAKE_THE_SAME}; missing or "
            f"unknown: {sorted(different)[:5]}"
        )
    for name, array in kept.items():
        expected = network[name].shape
        if array.shape != expected:
            raise ValueError(
                f"the array {name!r} that client {client} has kept has the shape {array.shape}, "
                f"and the run's {expected}: {TAKE_THE_SAME}"
            )
