"""The roster: nodes join and leave during a run; each is asked for its identity when it joins.

An answer counts only if it holds CAPABILITIES, as those of this package's clients do. Any other
node is a training client whose client id is its node id. Its replies must show what the strategy
requires.

A client id belongs to the first node that gave it, as long as that node is present. A node is
banned if it returns with another client id, role or model, or if it gives the id of a known client
with another role or model. A node is refused, until its next answer, if its answer is malformed,
its client id is taken, or its table has other columns, or its classes other names, or its public
samples or frozen parameters are others, than those of most of the first nodes."""

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from logging import INFO, WARNING, LogRecord, getLogger
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from clients.core.protocol import (
    CAPABILITIES,
    CLIENT,
    MODEL,
    NOVEL,
    START_ERROR,
)
from fedapps.common.errors import brief
from fedapps.common.once import say_once
from strategies.core.common_properties import COMMON
from strategies.core.nodes import Nodes, NodeTable
from strategies.core.replies import (
    LACKS,
    Node,
    Requirement,
    error_of,
    has_raised,
)
from strategies.core.reply_checks import checked_values, raw_values

POLL_SECONDS = 0.5
ASKED_AT_ONCE = 5000  # nodes; a query and its reply take 3 kB of memory
SHOWN = 10  # nodes in a line of the log


# Parts of Flower's log records about an app without a query handler. The records come from Flower's
# own processes, so only their text identifies them.
UNANSWERED = ("No query function registered", "raised when processing a message by RayBackend")


class NoClientStartsError(RuntimeError):
    """Nodes are present, but each of them was refused."""


class Refusal(NamedTuple):
    """Why a node is refused."""

    cause: str
    reason: str


class Roster:
    """The connected nodes: waits at most `wait` seconds for `least` of them.

    - `start_timeout`: seconds in which nodes that are present at the start must answer, if that is
      longer than the timeout of later nodes.
    - `only_model`: limit the roster to clients whose network has this name.
    - `requires`: clients that do not offer what it says are refused.
    - `requires_too`: a further requirement, of a run and not of its method.
    - `strategy`: the strategy's name, for errors.
    - `ask`: False asks no node; all nodes are then foreign.

    `refused` counts by cause the nodes that the last call of `present` newly refused."""

    def __init__(
        self,
        least: int,
        wait: float,
        only_model: str,
        start_timeout: float = 0.0,
        *,
        ask: bool = True,
        requires: Requirement | None = None,
        requires_too: Requirement | None = None,
        strategy: str = "",
    ) -> None:
        self.least = least
        self.wait = wait
        self.only_model = only_model
        self.ask = ask
        self.requires = requires
        self.requires_too = requires_too
        self.strategy = strategy
        self._start_timeout = start_timeout  # 0 once the first nodes were asked
        self.refused: Counter[str] = Counter()
        self._nodes = NodeTable()  # all that were admitted
        self._common: dict[str, Any] = {}  # by property of COMMON, the value of most nodes
        self._all_present: range | None = None  # the nodes' ids if all of them are present
        self._cached_holders: Nodes | None = Nodes()  # None if nodes joined or left
        self._refusals: dict[int, Refusal] = {}  # present refusals, by node id
        self._banned: set[int] = set()

    @property
    def refusals(self) -> list[Refusal]:
        """Why nodes are refused at present."""
        return list(self._refusals.values())

    def present(self, grid: Grid, config: Mapping[str, Any], timeout: float) -> Nodes:
        """The nodes that are present, by client id; new nodes are queried with this `config`.

        Refused nodes count towards `least`: so a single bad client does not block the others. Nodes
        in the grid's own `refused`, if it has that, do not count. Raises NoClientStartsError if all
        nodes are refused, RuntimeError if too few answer within `wait` seconds."""
        self.refused = Counter()
        timeout = max(timeout, self._start_timeout)
        self._start_timeout = 0.0
        deadline = time.monotonic() + self.wait
        while True:
            given = grid.get_node_ids()
            # A simulation's nodes are a range, which takes no memory, whatever its length.
            ids = given if isinstance(given, range) else set(given)
            if ids != self._all_present:
                self._remove_absent(ids)
                self._admit_new(ids, grid, config, timeout)
                if isinstance(ids, range) and self._nodes.num_present == len(ids):
                    self._all_present = ids
                else:
                    self._all_present = None
            nodes = self._holders()
            refusals = [refusal for i, refusal in self._refusals.items() if i in ids]
            if nodes and len(nodes) + len(refusals) >= self.least:
                break
            if refusals and not nodes:
                raise _no_client_starts(refusals[0])
            # Nodes that came while others answered are asked first, however late it is.
            if time.monotonic() > deadline and set(grid.get_node_ids()) <= set(ids):
                raise self._too_few(nodes, refusals, grid)
            time.sleep(POLL_SECONDS)
        if self.only_model:
            nodes = nodes.of_kinds(lambda node: node.properties.get(MODEL) == self.only_model)
        return nodes

    def _remove_absent(self, ids: Collection[int]) -> None:
        absent = [node_id for node_id in self._nodes.present_ids() if node_id not in ids]
        for node_id in absent:
            self._nodes.remove(node_id)
            self._cached_holders = None

    def _admit_new(
        self, ids: Collection[int], grid: Grid, config: Mapping[str, Any], timeout: float
    ) -> None:
        """Query the nodes that are neither present nor banned, and admit or refuse them."""
        in_order = ids if isinstance(ids, range) else sorted(ids)
        new = (i for i in in_order if i not in self._banned and not self._nodes.is_present(i))
        without_client_id: list[Node] = []
        while batch := list(islice(new, ASKED_AT_ONCE)):
            without_client_id += self._query(batch, grid, config, timeout)
        # After all others: their node id could be the client id that another node gave.
        for node in without_client_id:
            self._admit(node)

    def _too_few(self, nodes: Nodes, refusals: list[Refusal], grid: Grid) -> RuntimeError:
        refused_by_grid: Mapping[int, str] = getattr(grid, "refused", {})
        advice = (
            "start more SuperNodes, wait longer (wait= of server_app and of strategies), or lower "
            "min_available_nodes (num-clients of fedapps run)"
        )
        if refused_by_grid:
            advice = "; ".join(f"node {i} is refused: {why}" for i, why in refused_by_grid.items())
        if refusals:
            advice += f"; one said: {refusals[0].reason}"
        return RuntimeError(
            f"{len(nodes)} of {self.least} nodes answered within {self.wait:.0f} s; {advice}"
        )

    def _holders(self) -> Nodes:
        """One node for each client: the first that gave the client id, if it is present.

        The same list until nodes join or leave."""
        if self._cached_holders is not None:
            return self._cached_holders
        columns, others = self._nodes.holders()
        for node, holder in others:
            self._refuse(node.id, "identity", f"client {node.client} is node {holder.id}")
        self._cached_holders = Nodes.of(columns)
        if self._refusals:
            for node in self._cached_holders:
                self._refusals.pop(node.id, None)
        return self._cached_holders

    def _query(
        self, node_ids: Sequence[int], grid: Grid, config: Mapping[str, Any], timeout: float
    ) -> list[Node]:
        """Ask new nodes for their identity, and admit or refuse nodes that give a client id.

        Returns the nodes whose client id is their node id; they are not admitted yet."""
        if not self.ask:
            return [Node(i, i, foreign=True) for i in node_ids]
        content = ConfigRecord(dict(config))
        messages = []
        for destination in node_ids:
            record = RecordDict({"config": content})
            messages.append(Message(record, dst_node_id=destination, message_type="query"))
        with unlogged(*UNANSWERED):
            replies = list(grid.send_and_receive(messages, timeout=timeout))
        node_ids_by_message = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        with_client_id = []
        without_client_id = []
        unanswered: dict[str, list[int]] = defaultdict(list)  # node ids, by the reason
        for reply in replies:
            node_id = node_ids_by_message.pop(reply.metadata.reply_to_message_id, None)
            if node_id is None:
                continue
            if has_raised(reply):
                unanswered[brief(error_of(reply))].append(node_id)
            node = self._identified(reply, node_id)
            if node is None:
                continue
            if CLIENT in node.properties:
                with_client_id.append(node)
            else:
                without_client_id.append(node)
        self._choose_common(with_client_id)
        for node in with_client_id:
            self._admit(node)
        for reason, nodes in unanswered.items():
            log(INFO, "%s", _unanswered_line(nodes, reason))
        return without_client_id

    def _identified(self, reply: Message, node_id: int) -> Node | None:
        """The node as its answer describes it; None if it is refused."""
        if has_raised(reply):
            return Node(node_id, node_id, foreign=True)
        if reply.has_error():
            self._refuse(node_id, "error", brief(error_of(reply)))
            return None
        raw = raw_values(reply.content)
        if CAPABILITIES not in raw:
            return Node(node_id, node_id, foreign=True)
        try:
            values = checked_values(raw)
        except Exception as error:  # whatever a client's bytes raise, only its node is refused
            self._refuse(node_id, "malformed", str(error))
            return None
        if START_ERROR in values:
            self._refuse(node_id, "error", values[START_ERROR])
            return None
        return Node(values.get(CLIENT, node_id), node_id, values.get(NOVEL, False), values)

    def _choose_common(self, nodes: Sequence[Node]) -> None:
        """Let the values of most of the first nodes that have a property of COMMON be those of the
        run."""
        for name, common in COMMON.items():
            values = [node.properties[name] for node in nodes if name in node.properties]
            if values and name not in self._common:
                self._common[name] = common.of_most(values)

    def _admit(self, node: Node) -> None:
        """Admit a node, unless it offers too little, contradicts an earlier identity, or has
        another value of a common property."""
        for requirement in (self.requires, self.requires_too):
            if requirement is not None and not requirement.is_offered(node.properties):
                self._refuse(node.id, LACKS, requirement.sentence(self.strategy))
                return
        for name, common in COMMON.items():
            if name not in node.properties:
                continue
            if common.is_same(node.properties[name], self._common[name]):
                continue
            if common.cause:
                self._refuse(node.id, common.cause, common.reason)
                return
            say_once(f"node {node.id}: {common.reason}", WARNING)
        for before in (self._nodes.by_id(node.id), self._nodes.by_client(node.client)):
            if before is not None and _identity(before) != _identity(node):
                self._banned.add(node.id)
                detail = f"it says {_identity(node)} where {_identity(before)} was said before"
                self._refuse(node.id, "identity", detail)
                return
        self._cached_holders = None
        self._nodes.add(node)

    def _refuse(self, node_id: int, cause: str, reason: str) -> None:
        """Count and log a refusal, once for each new reason."""
        refusal = Refusal(cause, reason)
        if self._refusals.get(node_id) != refusal:
            self._refusals[node_id] = refusal
            self.refused[cause] += 1
            log(WARNING, "node %s refused, %s: %s", node_id, cause, reason)


def _no_client_starts(first: Refusal) -> NoClientStartsError:
    if first.cause == LACKS:
        return NoClientStartsError(first.reason)
    return NoClientStartsError(f"no client could start; the first said: {first.reason}")


def _identity(node: Node) -> str:
    role = "novel" if node.novel else "training"
    return f"client {node.client}, {role}, model {node.properties.get('model', '')!r}"


def _unanswered_line(nodes: Sequence[int], reason: str) -> str:
    """The log's line about nodes whose app raised an error when it was asked for its identity."""
    shown = ", ".join(map(str, nodes[:SHOWN]))
    if len(nodes) > SHOWN:
        shown += f" and {len(nodes) - SHOWN} more"
    word = "node" if len(nodes) == 1 else "nodes"
    return f"{word} {shown}: no identity ({reason}); the node id is taken as the client's id"


@contextmanager
def unlogged(*words: str) -> Iterator[None]:
    """Suppress Flower's log records with one of these `words`.

    Flower's simulation logs a traceback for each app without a query handler, which is no error."""

    def is_wanted(record: LogRecord) -> bool:
        message = record.getMessage()
        return not any(part in message for part in words)

    logger = getLogger("flwr")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)
