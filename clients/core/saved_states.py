"""Whether a run can go on from the arrays of a saved one, the server's and the clients'."""

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
        named = f"the array {name!r} that client {client} has kept"
        check_shape(named, array.shape, network[name].shape)


def check_shape(named: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ValueError if the shape of a saved array, which the sentence calls `named`, is not the
    `expected` one."""
    if shape != expected:
        raise ValueError(
            f"{named} has the shape {shape}, and the run's {expected}: {TAKE_THE_SAME}"
        )
