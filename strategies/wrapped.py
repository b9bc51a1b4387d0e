"""Strategies around ours that run rounds of their own, such as Flower's privacy wrappers."""

from collections.abc import Iterable

from flwr.app import ArrayRecord

from clients.arrays import Arrays
from strategies.replies import Requirement


def check_wrapped(
    strategy: str,
    keeps_arrays: bool,
    requires: Requirement | None,
    record: ArrayRecord,
    wire: Iterable[Arrays | None],
) -> None:
    """Raise ValueError unless clients get and return (`wire`) the arrays of the wrapper's `record`:
    it clips replies against them by position, and adds noise to their aggregate."""
    whole = [(name, tuple(array.shape)) for name, array in record.items()]
    if keeps_arrays:
        why = "its arrays stay on the server, where no wrapper can add noise to them"
    elif requires is not None and requires.exchanges:
        why = f"its clients {requires.behaviour}, which no wrapper clips"
    elif any([(name, a.shape) for name, a in (one or {}).items()] != whole for one in wire):
        why = "its clients do not get and return the very arrays that a wrapper clips them against"
    else:
        return
    raise ValueError(
        f"{strategy} cannot run inside another strategy, such as Flower's privacy wrappers: {why}. "
        f"Call {strategy}.start itself; what privacy it can have is in docs/privacy.md"
    )
