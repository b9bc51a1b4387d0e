"""The state of a run: copies of the server's state, and clients' states."""

from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from copy import deepcopy
from typing import Any, Protocol

from clients.core.arrays import Arrays, unclear_statistics
from clients.core.protocol import RESTORE_STATE, SAVE_STATE
from clients.core.saved_states import TAKE_THE_SAME
from strategies.core.replies import Node, Update
from strategies.core.round_state import Round

STATE_BATCH = 100  # clients whose states travel in one exchange


class AskingStrategy(Protocol):
    """The part of a strategy that asks clients for their states, or sends them."""

    nodes: MutableSequence[Node]
    now: Round

    def exchange(self, action: str, payloads: Mapping[Node, Arrays]) -> list[Update]:
        """Send one more message to each node, and return the valid replies."""


def copy_containers(state: Any) -> Any:
    """The state with new dicts, lists and sets around the same arrays."""
    if isinstance(state, Mapping):
        return {key: copy_containers(value) for key, value in state.items()}
    if isinstance(state, list | set):
        return type(state)(map(copy_containers, state))
    return state


def own_copy(state: Mapping[str, Any], *, in_place: bool) -> dict[str, Any]:
    """A copy of `state` that a strategy may change.

    Optimizers change their arrays in place, and with `in_place` so does the strategy: these arrays
    are copied too."""
    copied: dict[str, Any] = copy_containers(state)
    changed_in_place = ["optimizers"]
    if in_place:
        changed_in_place.append("arrays")
    for key in changed_in_place:
        if key in copied:
            copied[key] = deepcopy(copied[key])
    return copied


def in_order_of(arrays: Arrays, saved: Arrays) -> Arrays:
    """The `saved` arrays in the order of `arrays`, by which `auto` knows its layers; a file has
    another one. Raises ValueError if the names differ."""
    different = sorted(saved.keys() ^ arrays.keys())
    if different:
        raise ValueError(
            f"the saved arrays do not fit: {TAKE_THE_SAME}; missing or unknown: {different[:5]}"
        )
    return {name: saved[name] for name in arrays}


def check_names(arrays: Arrays, strategy: str, other_way: str = "") -> None:
    """Raise ValueError if arrays without telling names may be running statistics.

    `other_way` is the part of the error's text that says what to pass instead of names."""
    unclear = unclear_statistics(arrays)
    if unclear:
        raise ValueError(
            f"{strategy} treats batch normalisation's statistics apart from weights, and arrays "
            f"named by number do not tell them: {', '.join(unclear):.200} may be some; {other_way}"
            "name the arrays as in ArrayRecord(net.state_dict()), or as Keras does, …/moving_mean"
        )


def client_states(strategy: AskingStrategy) -> Iterator[tuple[int, Arrays]]:
    """The states of a simulation's clients, by client id. A real node does not reveal its state.

    Raises RuntimeError if a client does not answer."""
    for batch in _batches(strategy.nodes):
        replies = strategy.exchange(SAVE_STATE, {node: {} for node in batch})
        if len(replies) < len(batch):
            raise RuntimeError(f"{len(replies)} of {len(batch)} clients answered with their state")
        for update in replies:
            if update.arrays:
                yield update.node.client, update.arrays


def return_client_states(strategy: AskingStrategy, states: dict[int, Arrays]) -> None:
    """Send present clients their states of the former run, and remove these from `states`."""
    if not states:
        return
    returning = [node for node in strategy.nodes if node.client in states]
    for batch in _batches(returning):
        payloads = {}
        for node in batch:
            # Removed at once, so that no state is in memory twice.
            payloads[node] = states.pop(node.client)
        strategy.exchange(RESTORE_STATE, payloads)
        strategy.now.bytes = {"down": 0, "up": 0}  # these messages are no traffic of the round


def _batches(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    for start in range(0, len(nodes), STATE_BATCH):
        yield nodes[start : start + STATE_BATCH]
