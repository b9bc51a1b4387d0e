"""Many clients on a node: `HostingGrid` is a grid of clients over a grid of nodes, `HostingApp` the
node's half, around a ClientApp.

The node with number p of P (``partition-id``, ``num-partitions``) hosts the clients c ≡ p (mod P)
of all num-clients. A node with its own data, or without these numbers, is one client. A message
carries the work of all clients of a node, and records that they share once; their replies return
together. Clients' states stay on their node: if it is lost, so are they, until a node with the
same number joins."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedapps.engines.in_process_grid import (
    AnsweringGrid,
    error_reply,
    respond,
    with_ids,
    with_records,
)

ASK = "query.hosted"  # asks a node which clients it hosts
OPENING = "query"  # asks a client who it is
TABLE = "fedapps.clients"  # record that says which records belong to which client
PARTITION = ("partition-id", "num-partitions")


def engine_of(grid: Grid) -> str:
    """Flower's engine of a ServerApp's grid: "flower", which simulates nodes, or "deployment"."""
    from flwr.superlink.grid import InMemoryGrid  # takes a second to import

    return "flower" if isinstance(grid, InMemoryGrid) else "deployment"


class HostingGrid(AnsweringGrid):
    """The clients 0 … `num_clients` − 1 on the nodes of `grid`, as if each were a node.

    A node is asked once for its number p of P, and has `timeout` seconds to answer. Nodes whose P
    is not that of most nodes host no clients; `refused` says why. P is counted again at every call
    of `get_node_ids` until the first work is sent, since nodes join late."""

    def __init__(self, grid: Grid, num_clients: int, timeout: float) -> None:
        super().__init__()
        self.set_run(grid.run)
        self._grid = grid
        self._num_clients = num_clients
        self._timeout = timeout
        # Node and client by id; the client is None if it is the whole node.
        self._clients: dict[int, tuple[int, int | None]] = {}
        self._places: dict[int, tuple[int, int] | None] = {}  # p and P by node
        self._partitions = 0  # P of most of the present nodes
        self._hosting: set[int] = set()  # nodes whose clients have ids
        self._working = False  # whether more than the opening question was sent
        self.refused: dict[int, str] = {}  # present nodes that host no clients, and why
        self._ids = count(1)
        # Of the messages to nodes that no reply was pulled for, the messages to clients, by id.
        self._pushed: dict[str, list[Message]] = {}

    def get_node_ids(self) -> Iterable[int]:
        """The ids of the clients whose nodes are present."""
        present = set(self._grid.get_node_ids())
        new = sorted(present - self._places.keys())
        if new:
            self._ask_places(new)
        answered = sorted(present & self._places.keys())
        self._assign({node: self._places[node] for node in answered})
        hosting = present - self.refused.keys()
        return [client_id for client_id, (node, _) in self._clients.items() if node in hosting]

    def answer(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        """The clients' replies, after all nodes have answered or `timeout` seconds."""
        packed = self._packed(messages)
        to_nodes = [message for message, _ in packed]
        replies = self._grid.send_and_receive(to_nodes, timeout=timeout)
        # Only now: Flower's grid gives messages their ids when it sends them.
        parts_by_id = {message.metadata.message_id: parts for message, parts in packed}
        for reply in replies:
            parts = parts_by_id.pop(reply.metadata.reply_to_message_id, [])
            yield from unpacked(reply, parts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send the messages to the nodes, without waiting for replies."""
        sent = with_ids(messages)
        packed = self._packed(sent)
        self._grid.push_messages([message for message, _ in packed])
        for message, parts in packed:
            self._pushed[message.metadata.message_id] = parts
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have arrived; the clients of a node reply together."""
        wanted = set(message_ids)
        to_nodes: list[str] = []
        for message_id, parts in self._pushed.items():
            if any(part.metadata.message_id in wanted for part in parts):
                to_nodes.append(message_id)
        replies: list[Message] = []
        for reply in self._grid.pull_messages(to_nodes):
            parts = self._pushed.pop(reply.metadata.reply_to_message_id, [])
            replies += unpacked(reply, parts)
        return replies

    def _ask_places(self, nodes: Sequence[int]) -> None:
        """Ask nodes for their number p of P."""
        questions = [Message(RecordDict(), node, ASK) for node in nodes]
        replies = list(self._grid.send_and_receive(questions, timeout=self._timeout))
        senders = {m.metadata.message_id: m.metadata.dst_node_id for m in questions}
        for reply in replies:
            node = senders.get(reply.metadata.reply_to_message_id)
            lost = reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE
            if node is not None and not lost:
                self._places[node] = place_in(reply)

    def _assign(self, places: Mapping[int, tuple[int, int] | None]) -> None:
        """Count P among the present nodes, and give an id to each client of those that agree."""
        votes = Counter(place[1] for place in places.values() if place)
        fixed = self._working and self._partitions
        if votes and not fixed:
            # Of two numbers with as many votes the larger one counts.
            self._partitions = max(votes, key=lambda number: (votes[number], number))
        formerly_refused = self.refused
        self.refused = {}
        for node, place in places.items():
            if place and place[1] != self._partitions:
                reason = f"it says that there are {place[1]} nodes, most say {self._partitions}"
                self.refused[node] = reason
                if formerly_refused.get(node) != reason:
                    log(WARNING, "node %s is refused: %s", node, reason)
            elif node not in self._hosting:
                self._hosting.add(node)
                self._add_clients(node, place)

    def _add_clients(self, node: int, place: tuple[int, int] | None) -> None:
        """Give an id to each client of a node with the number p of P, or to the node itself."""
        clients: Sequence[int | None] = [None]
        if place:
            number, partitions = place
            clients = range(number, self._num_clients, partitions)
            log(INFO, "node %s hosts %s clients", node, len(clients))
        for client in clients:
            self._clients[next(self._ids)] = (node, client)

    def _packed(self, messages: Sequence[Message]) -> list[tuple[Message, list[Message]]]:
        """The messages to nodes, each with the messages to clients that it carries."""
        groups: dict[tuple[int, str, bool], list[Message]] = {}
        for message in messages:
            node, client = self._clients[message.metadata.dst_node_id]
            self._working |= message.metadata.message_type != OPENING
            kind = (node, message.metadata.message_type, client is None)
            groups.setdefault(kind, []).append(message)
        packed = []
        for (node, action, whole_node), parts in groups.items():
            if whole_node:
                for part in parts:
                    packed.append((Message(part.content, node, action), [part]))
                continue
            clients = [self._clients[part.metadata.dst_node_id][1] for part in parts]
            header = {"clients": clients, "of": self._num_clients}
            content = pack([part.content for part in parts], header)
            packed.append((Message(content, node, action), parts))
        return packed


class HostingApp(ClientApp):
    """Lets `app` answer for every client that the node hosts, each with its own context."""

    def __init__(self, app: ClientApp) -> None:
        super().__init__()
        self._app = app

    def __call__(self, message: Message, context: Context) -> Message:
        """The replies of all clients that the message is for, in one."""
        place = _place(context.node_config)
        if message.metadata.message_type == ASK:
            return Message(RecordDict({"place": place}), reply_to=message)
        if TABLE not in message.content:
            return respond(self._app, message, context)
        header, contents = unpack(message.content)
        states = _states(context.state)
        replies: list[RecordDict | str] = []
        for client, records in zip(header["clients"], contents, strict=True):
            assert not isinstance(records, str)
            if not _hosts(place, client):
                replies.append(f"this node hosts no client {client!r}")
                continue
            client_config = dict(zip(PARTITION, (client, header["of"]), strict=True))
            client_context = Context(
                context.run_id,
                context.node_id,
                context.node_config | client_config,
                states.get(f"{client}:", RecordDict()),
                context.run_config,
            )
            reply = respond(self._app, with_records(message, records), client_context)
            states[f"{client}:"] = client_context.state
            if reply.has_error():
                replies.append(reply.error.reason or "")
            else:
                replies.append(reply.content)
        context.state = _joined(states)
        return Message(pack(replies, {}), reply_to=message)


def pack(contents: Sequence[RecordDict | str], header: Mapping[str, Any]) -> RecordDict:
    """Several contents, or errors in their place, and a header in one content. A record that
    several of them hold is stored once."""
    records: dict[str, Any] = {}
    keys: dict[int, str] = {}  # of the records, by id()
    table: list[dict[str, str] | str] = []  # for each content its records' keys by name
    for content in contents:
        if isinstance(content, str):
            table.append(content)
            continue
        for record in content.values():
            if id(record) not in keys:
                keys[id(record)] = str(len(keys))
                records[keys[id(record)]] = record
        table.append({name: keys[id(record)] for name, record in content.items()})
    return RecordDict({**records, TABLE: ConfigRecord({"json": json.dumps([header, table])})})


def unpack(content: RecordDict) -> tuple[Mapping[str, Any], list[Mapping[str, Any] | str]]:
    """The header that `pack` got, and the records of each content, or the errors.

    Raises ValueError, TypeError, AttributeError or KeyError for content that `pack` did not make.
    """
    header, table = json.loads(str(content.config_records[TABLE]["json"]))
    contents: list[Mapping[str, Any] | str] = []
    for entry in table:
        if isinstance(entry, str):
            contents.append(entry)
        else:
            contents.append({name: content[key] for name, key in entry.items()})
    return header, contents


def unpacked(reply: Message, sent: Sequence[Message]) -> list[Message]:
    """The replies in a node's reply to the messages `sent`."""
    if reply.has_error():
        return [Message(reply.error, reply_to=message) for message in sent]
    if TABLE not in reply.content:
        return [Message(reply.content, reply_to=message) for message in sent[:1]]
    try:
        contents = unpack(reply.content)[1]
        if len(contents) != len(sent):
            raise ValueError(f"{len(contents)} replies to {len(sent)} messages")
    except Exception as error:  # a malicious node's reply must cost its own clients only
        reason = f"malformed reply: {error}"
        return [error_reply(message, reason, ErrorCode.UNKNOWN) for message in sent]
    replies = []
    for message, content in zip(sent, contents, strict=True):
        if isinstance(content, str):
            replies.append(error_reply(message, content))
        else:
            replies.append(Message(RecordDict(dict(content)), reply_to=message))
    return replies


def place_in(reply: Message) -> tuple[int, int] | None:
    """The node's number p, and the number P of nodes; None for a node that is one client."""
    if reply.has_error():  # its app hosts no clients
        return None
    place: Mapping[str, Any] = reply.content.metric_records.get("place", {})
    number = place.get(PARTITION[0])
    partitions = place.get(PARTITION[1])
    if not isinstance(number, int) or not isinstance(partitions, int):
        return None
    return (number, partitions) if 0 <= number < partitions else None


def _place(node_config: Mapping[str, Any]) -> MetricRecord:
    """A node's number p of P, as a record; an empty one if the node has its own data."""
    if "data-path" in node_config or any(key not in node_config for key in PARTITION):
        return MetricRecord()
    return MetricRecord({key: int(node_config[key]) for key in PARTITION})


def _hosts(place: Mapping[str, Any], client: Any) -> bool:
    """Whether the node hosts a client of that number. Without this check a server could ask for
    one user's data under many numbers."""
    is_number = isinstance(client, int) and not isinstance(client, bool)
    if not place or not is_number or client < 0:
        return False
    return bool(client % place["num-partitions"] == place["partition-id"])


def _states(state: RecordDict) -> dict[str, RecordDict]:
    """The clients' states, by the prefix of their keys in the node's state."""
    states: dict[str, RecordDict] = {}
    for key, record in state.items():
        client, colon, name = key.partition(":")
        states.setdefault(client + colon, RecordDict())[name] = record
    return states


def _joined(states: Mapping[str, RecordDict]) -> RecordDict:
    """The node's state with all clients' states: the inverse of `_states`."""
    joined = RecordDict()
    for prefix, state in states.items():
        for key, record in state.items():
            joined[prefix + key] = record
    return joined
