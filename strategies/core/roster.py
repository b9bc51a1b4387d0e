"""The roster: nodes join and leave during a run; each is asked for its identity when it joins.

Only clients of this package are believed; their answer holds CAPABILITIES. Any other node is a
training client of its node id, whatever it answers, and its replies must show what the strategy
requires.

A client id belongs to the first node that gave it, while that node is present. A node that returns
with another id, role or model, or gives a client's id with another role or model, is banned. A node
whose answer is malformed, or whose client id is taken, is refused for the time being."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from logging import INFO, WARNING, LogRecord, getLogger
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from clients.core.protocol import CAPABILITIES
from fedapps.common.errors import brief
from strategies.core.replies import LACKS, Node, Requirement, error_of, has_raised
from strategies.core.reply_metrics import checked_values, raw_values

POLL_SECONDS = 0.5
ASKED_AT_ONCE = 5000  # nodes; a question and its answer take 3 kB of memory
SHOWN = 10  # nodes in a line of the log
# Flower's log records of an app without a query handler. They come from Flower's own processes, so
# their text is all that tells them apart.
UNANSWERED = ("No query function registered", "raised when processing a message by RayBackend")


class NoClientStartsError(RuntimeError):
    """Nodes are present, but each of them was refused."""


class Refusal(NamedTuple):
    """Why a node is refused."""

    cause: str
    reason: str


class Roster:
    """The connected nodes: waits at most `wait` seconds for `least` of them.

    Nodes present at the start have `start_timeout` seconds to answer, if that is longer than the
    timeout of later ones. With `only_model` the roster is limited to clients whose network has that
    name. Clients that do not offer what `requires` says are refused. Unless `ask`, all nodes are
    foreign. `refused` counts by cause the nodes that the last call of `present` newly refused."""

    def __init__(
        self,
        least: int,
        wait: float,
        only_model: str,
        start_timeout: float = 0.0,
        *,
        ask: bool = True,
        requires: Requirement | None = None,
        strategy: str = "",
    ) -> None:
        self.least, self.wait, self.only_model = least, wait, only_model
        self.ask, self.requires, self.strategy = ask, requires, strategy
        self._start_timeout = start_timeout  # 0 once the first nodes were asked
        self.refused: Counter[str] = Counter()
        self._present: dict[int, Node] = {}  # by node id
        self._nodes: dict[int, Node] = {}  # by node id, with its first identity
        self._clients: dict[int, Node] = {}  # by client id, the first node that gave it
        self._holding: list[Node] | None = []  # what `_holders` returns; None if nodes changed
        self._refusals: dict[int, Refusal] = {}  # that hold at present, by node id
        self._properties: dict[str, Mapping[str, Any]] = {}  # of nodes, one object for equal ones
        self._banned: set[int] = set()

    def present(self, grid: Grid, config: Mapping[str, Any], timeout: float) -> list[Node]:
        """The nodes that are present, by client id; new ones are asked, with this `config`.

        Refused nodes count towards `least`, so that one bad client does not block the others. Nodes
        that the grid itself leaves out, its `refused` if it has that, do not count. Raises
        NoClientStartsError if all nodes are refused, RuntimeError if too few answer."""
        self.refused = Counter()
        timeout, self._start_timeout = max(timeout, self._start_timeout), 0.0
        deadline = time.monotonic() + self.wait
        while True:
            ids = set(grid.get_node_ids())
            for i in [i for i in self._present if i not in ids]:
                del self._present[i]
                self._holding = None
            new = sorted(ids.difference(self._present, self._banned))
            silent = list[Node]()
            for at in range(0, len(new), ASKED_AT_ONCE):
                silent += self._query(new[at : at + ASKED_AT_ONCE], grid, config, timeout)
            for node in silent:  # those that gave a client id come first
                self._admit(node)
            nodes = self._holders()
            refusals = [refusal for i, refusal in self._refusals.items() if i in ids]
            if nodes and len(nodes) + len(refusals) >= self.least:
                break
            if refusals and not nodes:
                first = refusals[0]
                if first.cause == LACKS:
                    raise NoClientStartsError(first.reason)
                raise NoClientStartsError(f"no client could start; the first said: {first.reason}")
            if time.monotonic() > deadline:
                left_out: Mapping[int, str] = getattr(grid, "refused", {})
                refused = "; ".join(f"node {i} is refused: {why}" for i, why in left_out.items())
                raise RuntimeError(
                    f"{len(nodes)} of {self.least} nodes answered within {self.wait:.0f} s; "
                    + (refused or "start more SuperNodes or lower num-clients")
                    + (f"; one said: {refusals[0].reason}" if refusals else "")
                )
            time.sleep(POLL_SECONDS)
        if self.only_model:
            nodes = [n for n in nodes if n.properties.get("model") == self.only_model]
        return nodes

    def _holders(self) -> list[Node]:
        """One node for each client: the first that gave the client id, if it is present. The same
        list until nodes join or leave."""
        if self._holding is not None:
            return self._holding
        holders: dict[int, Node] = {}
        first = {node.client: node.id for node in self._clients.values()}
        for node in sorted(self._present.values(), key=lambda node: node.id != first[node.client]):
            holder = holders.setdefault(node.client, node)
            if holder is node:
                self._refusals.pop(node.id, None)
            else:
                self._refuse(node.id, "identity", f"client {node.client} is node {holder.id}")
        self._holding = sorted(holders.values())
        return self._holding

    def _query(
        self, node_ids: Sequence[int], grid: Grid, config: Mapping[str, Any], timeout: float
    ) -> list[Node]:
        """Ask new nodes for their identity; refuse, or admit, those that give one. Returns those
        that get their node id as client id."""
        if not self.ask:
            return [Node(i, i, foreign=True) for i in node_ids]
        content = ConfigRecord(dict(config))
        messages = [
            Message(RecordDict({"config": content}), dst_node_id=i, message_type="query")
            for i in node_ids
        ]
        with unlogged(*UNANSWERED):
            replies = list(grid.send_and_receive(messages, timeout=timeout))
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        silent = []
        unanswered: dict[str, list[int]] = defaultdict(list)  # nodes, by the reason
        for reply in replies:
            node_id = asked.pop(reply.metadata.reply_to_message_id, None)
            if node_id is None:
                continue
            if has_raised(reply):
                unanswered[brief(error_of(reply))].append(node_id)
            node = self._identified(reply, node_id)
            if node is None:
                continue
            if "client" in node.properties:
                self._admit(node)
            else:
                silent.append(node)
        for reason, nodes in unanswered.items():
            log(INFO, "%s", _unanswered_line(nodes, reason))
        return silent

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
        except Exception as error:  # a malformed answer costs that node alone
            self._refuse(node_id, "malformed", str(error))
            return None
        if "error" in values:
            self._refuse(node_id, "error", values["error"])
            return None
        return Node(values.get("client", node_id), node_id, values.get("novel", False), values)

    def _admit(self, node: Node) -> None:
        """Admit a node, unless it offers too little or contradicts an earlier identity."""
        if self.requires is not None and not self.requires.is_offered(node.properties):
            self._refuse(node.id, LACKS, self._needed())
            return
        for before in (self._nodes.get(node.id), self._clients.get(node.client)):
            if before is not None and _identity(before) != _identity(node):
                self._banned.add(node.id)
                detail = f"it says {_identity(node)} where {_identity(before)} was said before"
                self._refuse(node.id, "identity", detail)
                return
        rest = {name: value for name, value in node.properties.items() if name != "client"}
        properties = self._properties.setdefault(repr(sorted(rest.items())), rest)
        node, self._holding = replace(node, properties=properties), None
        self._nodes[node.id] = self._present[node.id] = node
        self._clients.setdefault(node.client, node)

    def _needed(self) -> str:
        return "" if self.requires is None else self.requires.sentence(self.strategy)

    def _refuse(self, node_id: int, cause: str, reason: str) -> None:
        """Count and log a refusal, once for each new reason."""
        refusal = Refusal(cause, reason)
        if self._refusals.get(node_id) != refusal:
            self._refusals[node_id] = refusal
            self.refused[cause] += 1
            log(WARNING, "node %s refused, %s: %s", node_id, cause, reason)


def _identity(node: Node) -> str:
    role = "novel" if node.novel else "training"
    return f"client {node.client}, {role}, model {node.properties.get('model', '')!r}"


def _unanswered_line(nodes: Sequence[int], reason: str) -> str:
    """What is said of nodes whose app raised an error at the question who they are."""
    shown = ", ".join(map(str, nodes[:SHOWN]))
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    word = "node" if len(nodes) == 1 else "nodes"
    return f"{word} {shown}{more}: no identity ({reason}); the node id is taken as the client's id"


@contextmanager
def unlogged(*words: str) -> Iterator[None]:
    """Suppress Flower's log records with one of these `words`: its simulation logs a traceback for
    each app without a query handler, which is no error."""

    def is_wanted(record: LogRecord) -> bool:
        message = record.getMessage()
        return not any(part in message for part in words)

    logger = getLogger("flwr")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)
