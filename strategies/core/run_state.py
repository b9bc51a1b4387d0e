"""State that lives through a run: of the server before a round, and of a simulation's clients."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord
from flwr.common.logger import log

from clients.core.arrays import Arrays, from_record, unclear_statistics
from clients.core.protocol import RESTORE_STATE, SAVE_STATE
from strategies.core.replies import Node, finite
from strategies.core.strategy import StrategyBase

NOT_OF_MODEL = ("round", "undone-rounds", "sizes", "privacy", "token")  # keys of a strategy's state
STATE_BATCH = 100  # clients whose states travel in one exchange


def copy_containers(state: Any) -> Any:
    """The state with new dicts, lists and sets around the same arrays."""
    if isinstance(state, Mapping):
        return {key: copy_containers(value) for key, value in state.items()}
    if isinstance(state, list | set):
        return type(state)(map(copy_containers, state))
    return state


def own_copy(state: Mapping[str, Any], *, in_place: bool) -> dict[str, Any]:
    """A state that a strategy may change without changing `state`; `in_place`: as its own."""
    copied: dict[str, Any] = copy_containers(state)
    for name in ("optimizers", "arrays") if in_place else ("optimizers",):
        if name in copied:
            copied[name] = deepcopy(copied[name])
    return copied


def snapshot(strategy: StrategyBase) -> dict[str, Any]:
    """The state before `aggregate`, with copies of all that it may change."""
    return own_copy(strategy.state(), in_place=strategy.in_place)


def model_is_finite(strategy: StrategyBase) -> bool:
    """Whether no NaN or infinity is in the model's part of the state."""
    return finite({k: v for k, v in strategy.state().items() if k not in NOT_OF_MODEL})


def undo_round(strategy: StrategyBase, before: dict[str, Any]) -> None:
    """Return to the state `before` the round; what was spent of a privacy budget stays spent."""
    log(WARNING, "round %s is undone: NaN or infinity would come into the model", strategy.round)
    strategy.forget()
    spent = {"privacy": strategy.privacy.state()} if strategy.privacy else {}
    strategy.load_state(before | spent | {"handout": strategy.published_models})
    strategy.undone_rounds += 1
    strategy.now.report["undone"] = True


def check_names(arrays: Arrays, strategy: str, other_way: str = "") -> None:
    """Raise ValueError if running statistics may be among the arrays under no name that tells.

    `other_way` says what else to pass than names."""
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
        self._taken: ArrayRecord | None = None  # the record that was taken over last

    def check_wrapped(self, record: ArrayRecord, payloads: Collection[Arrays]) -> None:
        """Raise ValueError unless a wrapper can protect the strategy: clients must get and return
        the arrays of the wrapper's `record`, by whose positions it clips replies and adds noise."""
        strategy, name = self._strategy, type(self._strategy).__name__
        needed = [(name, tuple(array.shape)) for name, array in record.items()]
        travelling = [*payloads, *((strategy.expected(sent) or {}) for sent in payloads)]
        if strategy.keeps_arrays:
            why = "its arrays stay on the server, where no wrapper can add noise to them"
        elif strategy.requires is not None and strategy.requires.exchanges:
            why = f"its clients {strategy.requires.behaviour}, which no wrapper clips"
        elif any([(n, a.shape) for n, a in arrays.items()] != needed for arrays in travelling):
            why = "its clients do not get and return the very arrays that a wrapper clips"
        else:
            return
        raise ValueError(
            f"{name} cannot run inside another strategy, such as Flower's privacy wrappers: {why}. "
            f"Call {name}.start itself; for its own privacy see docs/concepts/privacy.md"
        )

    def accept(self, record: ArrayRecord) -> None:
        """Take over Flower's arrays, unless the strategy gave them itself.

        Arrays that a wrapper changed replace the strategy's; all other state is kept."""
        strategy, messenger = self._strategy, self._strategy.messenger
        if record is self._taken or record is messenger.record:
            return
        arrays = from_record(record)
        if not strategy.runs_own_loop and self._taken is not None:
            state = copy_containers(strategy.state()) | {"handout": strategy.published_models}
            strategy.load_state(state | {"arrays": arrays})
            self._taken, messenger.record = record, None
            return
        if strategy.treats_statistics_apart:
            check_names(arrays, type(strategy).__name__)
        strategy.arrays = strategy.initialize(arrays)
        if strategy.former is not None:
            strategy.load_state(own_copy(strategy.former, in_place=strategy.in_place))
            strategy.former = None
        self._taken = record
        messenger.record = record if strategy.arrays is arrays else None


def client_states(strategy: StrategyBase) -> Iterator[tuple[int, Arrays]]:
    """The states of a simulation's clients, by client id; a real node does not reveal its state.

    Raises RuntimeError if a client does not answer."""
    for batch in _batches(strategy.nodes):
        replies = strategy.exchange(SAVE_STATE, {node: {} for node in batch})
        if len(replies) < len(batch):
            raise RuntimeError(f"{len(replies)} of {len(batch)} clients answered with their state")
        yield from ((update.node.client, update.arrays) for update in replies if update.arrays)


def return_client_states(strategy: StrategyBase, states: dict[int, Arrays]) -> None:
    """Send present clients their states of a former run, and remove them from `states`."""
    known = [node for node in strategy.nodes if node.client in states]
    for batch in _batches(known):
        strategy.exchange(RESTORE_STATE, {node: states.pop(node.client) for node in batch})
        strategy.now.bytes = {"down": 0, "up": 0}  # not traffic of the round


def _batches(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    return (nodes[at : at + STATE_BATCH] for at in range(0, len(nodes), STATE_BATCH))
