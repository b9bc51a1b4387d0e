"""The state of an earlier run, from which `server_app(former=…)` continues."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedapps.methods import METHODS
from strategies.core.privacy import Privacy, checked

EXPECTED = (
    "give the strategy.state() of an earlier run, which `then=` gets; trained weights alone belong "
    "into the network that `model=` makes"
)


# Of a run that trains without privacy, about the one from which it starts.
WITHOUT_EPSILON = (
    "{} was trained with differential privacy, and dp is 'none' here: its ε does not hold for what "
    "is trained from now on"
)


def check_former(former: Any) -> None:
    """Raise ValueError for an object that is no strategy's state."""
    if not isinstance(former, Mapping):
        raise ValueError(f"former is a {type(former).__name__}; {EXPECTED}")
    arrays = former.get("arrays")
    if not isinstance(arrays, Mapping):
        keys = ", ".join(map(str, former))
        raise ValueError(f"former has no 'arrays' by name, but {keys:.200}; {EXPECTED}")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            kind = type(array).__name__
            raise ValueError(
                f"former has the array {name!r:.200} as a {kind}, not as numpy's; {EXPECTED}"
            )


def rounds_of(former: Mapping[str, Any]) -> int:
    """The number of rounds that the earlier run has had."""
    return int(former.get("round", 0))


def spent_before(former: Mapping[str, Any], dp: str) -> dict[str, Any]:
    """The budget that the earlier run has spent, for a run with `dp`. Raises ValueError if it was
    trained without privacy."""
    spent = former.get("privacy")
    if not spent:
        raise ValueError(
            f"dp is {dp!r}, but former was trained without privacy, so no ε holds for a model that "
            "starts from it; leave former out, or dp"
        )
    return checked(spent, "former['privacy']")


def notes_on(
    former: Mapping[str, Any], method: str, rounds: int, privacy: Privacy | None
) -> Iterator[str]:
    """What a run of `rounds` rounds that continues from `former` should say: that nothing is left
    to train, that clients may lack what they kept, and that the ε of `former` no longer holds."""
    done = rounds_of(former)
    if done >= rounds:
        yield (
            f"nothing is trained: former has had {done} rounds, and rounds={rounds} counts them; "
            f"for {rounds} further rounds write rounds={done + rounds}"
        )
    if METHODS[method].client.needs_state:
        yield (
            f"clients of {method} keep a state of their own, which former does not hold: each "
            "finds it in its node's state-dir, or begins without it where the node configuration "
            "names none, as in Flower's simulation"
        )
    if former.get("privacy") and privacy is None:
        yield WITHOUT_EPSILON.format("former")
