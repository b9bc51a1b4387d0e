"""Who is there: nodes come and go while a run goes on, and each is asked who it is when it comes.

Only our own clients are believed, who say so in their answer; any other node is a training client
of its node id, whatever it answers, which has to show what the strategy requires.

A client id belongs to the node that told it first, for as long as that is there. A node that comes
back under another id, role or model, or takes a client's id under another role or model, is refused
from then on; one that tells what no honest client tells, or whose id is taken, waits."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import WARNING, LogRecord, getLogger
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from clients.protocol import OFFERS
from strategies.replies import LACKS, Node, raised, reason_of
from strategies.requirement import Requirement
from strategies.told import told, typed

POLL_SECONDS = 0.5


class Roster:
    """The connected nodes, at least `least` of them, waited for at most `wait` seconds.

    Those there at the start have `start_timeout` seconds to answer, if that is longer than what
    later ones have. With `only_model` it is cut to the clients whose network has that name.
    Clients that offer less than what `requires` says are refused. Unless it may `ask`, nobody is
    known. `refused` counts by cause the nodes that the last look at the roster refused for the
    first time."""

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
        self._patience = start_timeout  # until all that are there at the start have been asked
        self.refused: Counter[str] = Counter()
        self._present: dict[int, Node] = {}  # by node id, as each said when it came
        self._nodes: dict[int, Node] = {}  # by node id, as each said when it first came
        self._clients: dict[int, Node] = {}  # by client id, the first node that told it
        self._reasons: dict[int, str] = {}  # why a node is refused at present, by its id
        self._banned: set[int] = set()

    def present(self, grid: Grid, config: Mapping[str, Any], timeout: float) -> list[Node]:
        """The nodes that are there now, by client id; new ones get `config` with the question.

        Nodes that are refused count among those that are waited for, so that one bad client does
        not keep the others; those do not that the grid leaves out itself, as its `refused` tells if
        it has one. Raises RuntimeError if too few answer, or none acceptably."""
        self.refused = Counter()
        timeout, self._patience = max(timeout, self._patience), 0.0
        deadline = time.monotonic() + self.wait
        while True:
            ids = set(grid.get_node_ids())
            self._present = {i: node for i, node in self._present.items() if i in ids}
            self._ask(sorted(ids - self._present.keys() - self._banned), grid, config, timeout)
            nodes = self._holders()
            others = [reason for i, reason in self._reasons.items() if i in ids]
            if nodes and len(nodes) + len(others) >= self.least:
                break
            if others and not nodes:
                if self.requires is not None and others[0] == self._needed():
                    raise RuntimeError(others[0])
                raise RuntimeError(f"no client could start; the first said: {others[0]}")
            if time.monotonic() > deadline:
                left_out: Mapping[int, str] = getattr(grid, "refused", {})
                refused = "; ".join(f"node {i} is refused: {why}" for i, why in left_out.items())
                raise RuntimeError(
                    f"{len(nodes)} of {self.least} nodes answered within {self.wait:.0f} s; "
                    + (refused or "start more SuperNodes or lower num-clients")
                    + (f"; one said: {others[0]}" if others else "")
                )
            time.sleep(POLL_SECONDS)
        if self.only_model:
            nodes = [n for n in nodes if n.properties.get("model") == self.only_model]
        return nodes

    def _holders(self) -> list[Node]:
        """The nodes by client id, one of each: the first that told it, if it is there."""
        holders: dict[int, Node] = {}
        first = {node.client: node.id for node in self._clients.values()}
        for node in sorted(self._present.values(), key=lambda node: node.id != first[node.client]):
            holder = holders.setdefault(node.client, node)
            if holder is node:
                self._reasons.pop(node.id, None)
            else:
                self._refuse(node.id, "identity", f"client {node.client} is node {holder.id}")
        return sorted(holders.values())

    def _ask(
        self, node_ids: Sequence[int], grid: Grid, config: Mapping[str, Any], timeout: float
    ) -> None:
        """Query new nodes; one that is not ours is a training client of its node id."""
        if not node_ids:
            return
        if not self.ask:
            for i in node_ids:
                self._admit(Node(i, i, foreign=True))
            return
        content = ConfigRecord(dict(config))
        messages = [
            Message(RecordDict({"config": content}), dst_node_id=i, message_type="query")
            for i in node_ids
        ]
        with unlogged("No query function registered"):
            replies = list(grid.send_and_receive(messages, timeout=timeout))
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        found: list[Node] = []
        nameless: list[Node] = []  # come last: who tells an id goes before whom it is given
        for reply in replies:
            node_id = asked.pop(reply.metadata.reply_to_message_id, None)
            if node_id is None:
                continue
            if reply.has_error():
                if raised(reply):
                    nameless.append(Node(node_id, node_id, foreign=True))
                else:
                    self._refuse(node_id, "error", reason_of(reply))
                continue
            if OFFERS not in told(reply.content):
                nameless.append(Node(node_id, node_id, foreign=True))
                continue
            try:
                said = typed(told(reply.content))
            except Exception as error:  # whatever a stranger tells costs that node alone
                self._refuse(node_id, "malformed", str(error))
                continue
            if "error" in said:
                self._refuse(node_id, "error", said["error"])
                continue
            node = Node(said.get("client", node_id), node_id, said.get("novel", False), said)
            (found if "client" in said else nameless).append(node)
        for node in found + nameless:
            self._admit(node)

    def _admit(self, node: Node) -> None:
        """Take in a node's word, unless it or another node gave another word before, or it offers
        too little."""
        if self.requires is not None and not self.requires.offered(node.properties):
            self._refuse(node.id, LACKS, self._needed())
            return
        for before in (self._nodes.get(node.id), self._clients.get(node.client)):
            if before is not None and _identity(before) != _identity(node):
                self._banned.add(node.id)
                detail = f"it says {_identity(node)} where {_identity(before)} was said before"
                self._refuse(node.id, "identity", detail)
                return
        self._nodes[node.id] = self._present[node.id] = node
        self._clients.setdefault(node.client, node)

    def _needed(self) -> str:
        return "" if self.requires is None else self.requires.sentence(self.strategy)

    def _refuse(self, node_id: int, cause: str, reason: str) -> None:
        """Count and log a node that is refused, once as long as the reason stays the same."""
        if self._reasons.get(node_id) != reason:
            self._reasons[node_id] = reason
            self.refused[cause] += 1
            log(WARNING, "node %s refused, %s: %s", node_id, cause, reason)


def _identity(node: Node) -> str:
    role = "novel" if node.novel else "training"
    return f"client {node.client}, {role}, model {node.properties.get('model', '')!r}"


@contextmanager
def unlogged(words: str) -> Iterator[None]:
    """Without what Flower logs with these `words`: where it simulates nodes it logs the traceback
    of each app without a handler, which is no error."""

    def wanted(record: LogRecord) -> bool:
        return words not in record.getMessage()

    logger = getLogger("flwr")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
