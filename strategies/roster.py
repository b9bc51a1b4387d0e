"""Who is there: nodes join and leave while a run goes on, and each is asked once who it is."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from strategies.replies import Node, reason_of, unknown_query

POLL_SECONDS = 0.5


class Roster:
    """The connected nodes, at least `least` of them, waited for at most `wait` seconds.

    With `only_model` it is cut to the clients whose network has that name."""

    def __init__(self, least: int, wait: float, only_model: str) -> None:
        self.least, self.wait, self.only_model = least, wait, only_model
        self._known: dict[int, Node] = {}

    def present(self, grid: Grid, config: Mapping[str, Any], timeout: float) -> list[Node]:
        """The nodes that are there now, by client id; new ones get `config` with the question.

        Raises RuntimeError if too few of them answer, or two claim one client id."""
        deadline = time.monotonic() + self.wait
        while True:
            ids = set(grid.get_node_ids())
            failures = self._ask(sorted(ids - self._known.keys()), grid, config, timeout)
            nodes = sorted(self._known[i] for i in ids if i in self._known)
            if len(nodes) >= self.least:
                break
            if failures and not nodes:
                raise RuntimeError(f"no client could start; the first said: {failures[0]}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{len(nodes)} of {self.least} nodes answered within {self.wait:.0f} s; start "
                    "more SuperNodes or lower num-clients"
                    + (f"; one said: {failures[0]}" if failures else "")
                )
            time.sleep(POLL_SECONDS)
        if self.only_model:
            nodes = [n for n in nodes if n.properties.get("model") == self.only_model]
        clients = Counter(node.client for node in nodes)
        if twice := [client for client, count in clients.items() if count > 1]:
            raise RuntimeError(f"client ids {twice} are claimed by more than one node each")
        return nodes

    def _ask(
        self, node_ids: Sequence[int], grid: Grid, config: Mapping[str, Any], timeout: float
    ) -> list[str]:
        """Query new nodes; one without a query handler is a training client of its node id."""
        if not node_ids:
            return []
        content = ConfigRecord(dict(config))
        messages = [
            Message(RecordDict({"config": content}), dst_node_id=i, message_type="query")
            for i in node_ids
        ]
        replies = list(grid.send_and_receive(messages, timeout=timeout))
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        failures = []
        for reply in replies:
            node_id = asked[reply.metadata.reply_to_message_id]
            if not reply.has_error():
                told: dict[str, Any] = {
                    k: v for r in reply.content.config_records.values() for k, v in r.items()
                }
                self._known[node_id] = Node(
                    int(told.get("client", node_id)), node_id, bool(told.get("novel")), told
                )
            elif unknown_query(reply):
                self._known[node_id] = Node(node_id, node_id)
            else:
                failures.append(reason_of(reply))
                log(WARNING, "node %s did not answer the query: %s", node_id, failures[-1])
        return failures
