"""The state of a run: copies of the server's state, arrays from Flower, clients' states."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from flwr.app import ArrayRecord

from clients.core.arrays import Arrays, from_record, unclear_statistics
from clients.core.protocol import RESTORE_STATE, SAVE_STATE
from strategies.core.replies import Node
from strategies.core.strategy import StrategyBase

STATE_BATCH = 100  # clients whose states travel in one exchange


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


class InitialArraysTracker:
    """The arrays that Flower's loop passes to a strategy: the strategy's own, or a wrapper's."""

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy
        self._accepted: ArrayRecord | None = None  # the last accepted record

    def check_wrapped(self, record: ArrayRecord, payloads: Collection[Arrays]) -> None:
        """Raise ValueError unless a wrapper can protect the strategy.

        A wrapper clips arrays and adds noise by their position in its `record`. So clients must get
        and return arrays of the same names, order and shapes."""
        strategy = self._strategy
        name = type(strategy).__name__
        if strategy.keeps_arrays:
            why = "its arrays stay on the server, where no wrapper can add noise to them"
        elif strategy.requires is not None and strategy.requires.exchanges:
            why = f"its clients {strategy.requires.behaviour}, which no wrapper clips"
        elif not self._are_like(record, payloads):
            why = "its clients do not get and return the very arrays that a wrapper clips"
        else:
            return
        raise ValueError(
            f"{name} cannot run inside another strategy, such as Flower's privacy wrappers: {why}. "
            f"Call {name}.start itself; for its own privacy see docs/concepts/privacy.md"
        )

    def _are_like(self, record: ArrayRecord, payloads: Collection[Arrays]) -> bool:
        """Whether payloads and expected replies have the names, order and shapes of the record."""
        needed = [(name, tuple(array.shape)) for name, array in record.items()]
        for sent in payloads:
            for arrays in (sent, self._strategy.expected(sent) or {}):
                if [(name, array.shape) for name, array in arrays.items()] != needed:
                    return False
        return True

    def accept(self, record: ArrayRecord) -> None:
        """Take over the arrays that Flower passes, unless the strategy itself returned them.

        The first arrays of a run initialize the strategy, which then loads its former state. Later
        arrays are those that a wrapper changed: they replace the strategy's, and all other state is
        kept. Raises ValueError as `initialize`, `load_state` and `check_names` do."""
        strategy = self._strategy
        messenger = strategy.messenger
        if record is self._accepted or record is messenger.record:
            return
        arrays = from_record(record)
        if not strategy.runs_own_loop and self._accepted is not None:
            state = copy_containers(strategy.state()) | {"handout": strategy.published_models}
            strategy.load_state(state | {"arrays": arrays})
            self._accepted = record
            messenger.record = None
            return
        if strategy.treats_statistics_apart:
            check_names(arrays, type(strategy).__name__)
        strategy.arrays = strategy.initialize(arrays)
        if strategy.former is not None:
            strategy.load_state(own_copy(strategy.former, in_place=strategy.in_place))
            strategy.former = None
        self._accepted = record
        messenger.record = record if strategy.arrays is arrays else None


def client_states(strategy: StrategyBase) -> Iterator[tuple[int, Arrays]]:
    """The states of a simulation's clients, by client id. A real node does not reveal its state.

    Raises RuntimeError if a client does not answer."""
    for batch in _batches(strategy.nodes):
        replies = strategy.exchange(SAVE_STATE, {node: {} for node in batch})
        if len(replies) < len(batch):
            raise RuntimeError(f"{len(replies)} of {len(batch)} clients answered with their state")
        for update in replies:
            if update.arrays:
                yield update.node.client, update.arrays


def return_client_states(strategy: StrategyBase, states: dict[int, Arrays]) -> None:
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
