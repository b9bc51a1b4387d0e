"""A strategy's messages to nodes.

Arrays that several nodes get are serialised once. Bytes are counted in the strategy's present
round. `strategies.core.checks_and_limits` reads the replies."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from clients.core.arrays import Arrays, filled, num_bytes, to_record
from strategies.core.checks_and_limits import Receiver
from strategies.core.replies import Node, Update
from strategies.core.round_state import Request, Round, Sent


class SendingStrategy(Protocol):
    """What a messenger reads of its strategy."""

    grid: Grid
    timeout: float
    now: Round
    arrays: Arrays
    arrayrecord_key: str
    configrecord_key: str
    receiver: Receiver


class Messenger:
    """Builds and sends a strategy's messages."""

    def __init__(self, strategy: SendingStrategy) -> None:
        self._strategy = strategy
        # The record of the strategy's present arrays; None if it is not made yet.
        self.record: ArrayRecord | None = None

    def exchanges(
        self, requests: Sequence[Request], config: Mapping[str, Any]
    ) -> list[Callable[[], list[Update]]]:
        """Send the requests together, each with this `config`.

        Returns a function for each request, which checks and returns its replies."""
        strategy = self._strategy
        records: dict[int, ArrayRecord] = {}  # shared by all requests
        sent_by_request: list[Sent] = []
        messages: list[Message] = []
        for request in requests:
            request_config = ConfigRecord({**config, **request.config})
            sent = self.messages(request.action, request.payloads, request_config, records)
            sent_by_request.append(sent)
            messages += [message for message, _ in sent]
        replies: list[Message] = []
        if messages:
            replies += strategy.grid.send_and_receive(messages, timeout=strategy.timeout)
        readers: list[Callable[[], list[Update]]] = []
        for request, sent in zip(requests, sent_by_request, strict=True):
            readers.append(partial(strategy.receiver.receive, sent, replies, request.like))
        return readers

    def messages(
        self,
        action: str,
        payloads: Mapping[Node, Arrays],
        config: ConfigRecord,
        records: dict[int, ArrayRecord] | None = None,
    ) -> Sent:
        """One message per node, of Flower's message type `action`.

        Arrays that nodes share are serialised once. `records` holds the results by the arrays' id;
        pass the same dict to share them with other messages."""
        strategy = self._strategy
        if records is None:
            records = {}
        if self.record is not None:
            records[id(strategy.arrays)] = self.record
        sent: Sent = []
        for node in sorted(payloads):
            arrays = payloads[node]
            sent.append((self.message(action, node, arrays, config, records), node))
            strategy.now.bytes["down"] += num_bytes(arrays.values())
        return sent

    def message(
        self,
        action: str,
        node: Node,
        arrays: Arrays,
        config: ConfigRecord,
        records: dict[int, ArrayRecord],
    ) -> Message:
        """A message that is not counted in the round; `records` are those of `messages`."""
        strategy = self._strategy
        if id(arrays) not in records:
            records[id(arrays)] = to_record(arrays)
        entries = {
            strategy.arrayrecord_key: records[id(arrays)],
            strategy.configrecord_key: config,
        }
        content = filled(RecordDict(), entries)
        return Message(content, dst_node_id=node.id, message_type=action)
