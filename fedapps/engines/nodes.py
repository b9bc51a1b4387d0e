"""Many clients on a node: `Hosts` is a grid over another one, `Host` its half around the ClientApp.

A node that is told to be number p of P (``partition-id``, ``num-partitions``) hosts the clients
c ≡ p (mod P) of all num-clients; one with data of its own, or that knows neither, is one client.
A message carries the work of all clients of its node, records that they share once, and their
replies come back together. What a client keeps stays with its node: where that is lost its clients
are, until a node of the same number comes."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedapps.engines.grid import alike, named, refusal, respond

ASK = "query.hosted"  # which clients live with a node
OPENING = "query"  # who a client is
TABLE = "fedapps.clients"  # record of a message that tells which records are whose


def engine_of(grid: Grid) -> str:
    """Which of Flower's engines a ServerApp's grid belongs to: "flower", which simulates nodes in
    the same process, or "deployment"."""
    from flwr.superlink.grid import InMemoryGrid  # a second, which nodes need not spend

    return "flower" if isinstance(grid, InMemoryGrid) else "deployment"


class Hosts(Grid):
    """The clients 0 … `num_clients` − 1 that live on the nodes of `grid`, as if each were a node.

    A node is asked once which of them live with it, and has `timeout` seconds to answer. Those that
    say another number P of nodes than most host nobody: they are in `refused`, which tells why. P
    is counted anew at each look at the nodes until the first work is sent, since they come late."""

    def __init__(self, grid: Grid, num_clients: int, timeout: float) -> None:
        self._grid, self._num_clients, self._timeout = grid, num_clients, timeout
        # Node and client by id; no client: it is all of the node.
        self._homes: dict[int, tuple[int, int | None]] = {}
        self._places: dict[int, tuple[int, int] | None] = {}  # p and P, as each node said
        self._partitions = 0  # P, as most of the nodes say that are there
        self._housed: set[int] = set()  # nodes whose clients have ids
        self._works = False  # whether more than the opening question was sent
        self.refused: dict[int, str] = {}  # nodes that are there, and why they host nobody
        self._ids = count(1)
        self._sent: dict[str, list[Message]] = {}  # of push_messages, by their node's message
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a client; Flower's deprecated way beside ``Message(…)``."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """The ids of the clients whose nodes are there."""
        there = set(self._grid.get_node_ids())
        if new := sorted(there - self._places.keys()):
            self._meet(new)
        self._house({node: self._places[node] for node in sorted(there & self._places.keys())})
        housed = there - self.refused.keys()
        return [i for i, (node, _) in self._homes.items() if node in housed]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send the messages; the ids of their replies to pull."""
        mine = named(messages)
        packed = self._packed(mine)
        for name, (_, own) in zip(
            self._grid.push_messages([m for m, _ in packed]), packed, strict=True
        ):
            self._sent[name] = own
        return [message.metadata.message_id for message in mine]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have come to the messages of these ids."""
        for reply in self._grid.pull_messages(list(self._sent)):
            for one in unpacked(reply, self._sent.pop(reply.metadata.reply_to_message_id)):
                self._replies[one.metadata.reply_to_message_id] = one
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """The replies that come within `timeout` seconds."""
        packed = self._packed(named(messages))
        replies = self._grid.send_and_receive([m for m, _ in packed], timeout=timeout)
        sent = {message.metadata.message_id: own for message, own in packed}
        return [
            one
            for reply in replies
            for one in unpacked(reply, sent.pop(reply.metadata.reply_to_message_id, []))
        ]

    def _meet(self, nodes: Sequence[int]) -> None:
        """Ask nodes that have not been asked yet for their place."""
        asked = [Message(RecordDict(), node, ASK) for node in nodes]
        replies = list(self._grid.send_and_receive(asked, timeout=self._timeout))
        whose = {message.metadata.message_id: message.metadata.dst_node_id for message in asked}
        for reply in replies:
            node = whose.get(reply.metadata.reply_to_message_id)
            away = reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE
            if node is not None and not away:
                self._places[node] = number_of(reply)

    def _house(self, there: Mapping[int, tuple[int, int] | None]) -> None:
        """Count what the nodes that are there say, and give an id to every client of those that
        say P."""
        votes = Counter(place[1] for place in there.values() if place)
        if votes and not (self._works and self._partitions):
            self._partitions = max(votes, key=lambda of: (votes[of], of))
        before, self.refused = self.refused, {}
        for node, place in there.items():
            if place and place[1] != self._partitions:
                why = f"it says that there are {place[1]} nodes, most say {self._partitions}"
                self.refused[node] = why
                if before.get(node) != why:
                    log(WARNING, "node %s is refused: %s", node, why)
            elif node not in self._housed:
                self._housed.add(node)
                clients: Iterable[int | None] = [None]
                if place:
                    clients = range(place[0], self._num_clients, place[1])
                    log(INFO, "node %s hosts %s clients", node, len(clients))
                self._homes |= {next(self._ids): (node, client) for client in clients}

    def _packed(self, messages: Sequence[Message]) -> list[tuple[Message, list[Message]]]:
        """What goes to the nodes, each message with those to its clients."""
        groups: dict[tuple[int, str, bool], list[Message]] = {}
        for message in messages:
            node, client = self._homes[message.metadata.dst_node_id]
            self._works |= message.metadata.message_type != OPENING
            kind = (node, message.metadata.message_type, client is None)
            groups.setdefault(kind, []).append(message)
        packed = []
        for (node, action, alone), own in groups.items():
            if alone:
                packed += [(Message(one.content, node, action), [one]) for one in own]
                continue
            clients = [self._homes[one.metadata.dst_node_id][1] for one in own]
            told = {"clients": clients, "of": self._num_clients}
            packed.append((Message(pack([one.content for one in own], told), node, action), own))
        return packed


class Host(ClientApp):
    """Lets `app` answer for every client that the node hosts, each with a context of its own."""

    def __init__(self, app: ClientApp) -> None:
        super().__init__()
        self._app = app

    def __call__(self, message: Message, context: Context) -> Message:
        """The replies of all clients that the message is for, in one."""
        if message.metadata.message_type == ASK:
            return Message(RecordDict({"place": _place(context.node_config)}), reply_to=message)
        if TABLE not in message.content:
            return self._app(message, context)
        told, contents = read(message.content)
        place = _place(context.node_config)
        states = _apart(context.state)
        replies: list[RecordDict | str] = []
        for client, records in zip(told["clients"], contents, strict=True):
            assert not isinstance(records, str)
            if not _hosts(place, client):
                replies.append(f"no client {client!r} lives with this node")
                continue
            number = {"partition-id": client, "num-partitions": told["of"]}
            own = Context(
                run_id=context.run_id,
                node_id=context.node_id,
                node_config=context.node_config | number,
                state=states.get(f"{client}:", RecordDict()),
                run_config=context.run_config,
            )
            reply = respond(self._app, alike(message, records), own)
            states[f"{client}:"] = own.state
            replies.append((reply.error.reason or "") if reply.has_error() else reply.content)
        context.state = RecordDict(
            {s + k: r for s, kept in states.items() for k, r in kept.items()}
        )
        return Message(pack(replies, {}), reply_to=message)


def pack(contents: Sequence[RecordDict | str], told: Mapping[str, Any]) -> RecordDict:
    """Several contents, or errors in their place, in one that also tells `told`; a record that
    several hold is there once."""
    records: dict[str, Any] = {}
    places: dict[int, str] = {}
    table: list[dict[str, str] | str] = []
    for content in contents:
        if isinstance(content, str):
            table.append(content)
            continue
        for record in content.values():
            if id(record) not in places:
                places[id(record)] = str(len(places))
                records[places[id(record)]] = record
        table.append({key: places[id(record)] for key, record in content.items()})
    return RecordDict({**records, TABLE: ConfigRecord({"json": json.dumps([told, table])})})


def read(content: RecordDict) -> tuple[Mapping[str, Any], list[Mapping[str, Any] | str]]:
    """What `pack` was told, and the records of each of its contents, or the errors.

    Raises ValueError, TypeError, AttributeError or KeyError for what no `pack` made."""
    told, table = json.loads(str(content.config_records[TABLE]["json"]))
    return told, [
        one if isinstance(one, str) else {key: content[place] for key, place in one.items()}
        for one in table
    ]


def unpacked(reply: Message, sent: Sequence[Message]) -> list[Message]:
    """The replies to the messages `sent` that a node's reply stands for."""
    if reply.has_error():
        return [Message(reply.error, reply_to=message) for message in sent]
    if TABLE not in reply.content:
        return [Message(reply.content, reply_to=message) for message in sent[:1]]
    try:
        contents = read(reply.content)[1]
        if len(contents) != len(sent):
            raise ValueError(f"{len(contents)} replies to {len(sent)} messages")
    except Exception as error:  # whatever a stranger's bytes provoke costs its own replies
        reason, code = f"malformed reply: {error}", ErrorCode.UNKNOWN
        return [refusal(message, reason, code) for message in sent]
    return [
        refusal(message, one)
        if isinstance(one, str)
        else Message(RecordDict(dict(one)), reply_to=message)
        for message, one in zip(sent, contents, strict=True)
    ]


def number_of(reply: Message) -> tuple[int, int] | None:
    """The number p of the node and that P of the nodes; None for a node that is one client."""
    if reply.has_error():  # an app that hosts nobody
        return None
    told: Mapping[str, Any] = reply.content.metric_records.get("place", {})
    number, of = told.get("partition-id"), told.get("num-partitions")
    if isinstance(number, int) and isinstance(of, int) and 0 <= number < of:
        return number, of
    return None


def _place(node_config: Mapping[str, Any]) -> MetricRecord:
    """What a node tells of its place among the nodes, nothing if it has data of its own."""
    keys = ("partition-id", "num-partitions")
    if "data-path" in node_config or any(key not in node_config for key in keys):
        return MetricRecord()
    return MetricRecord({key: int(node_config[key]) for key in keys})


def _hosts(place: Mapping[str, Any], client: Any) -> bool:
    """Whether a client of that number lives with the node: a server could ask one user's data
    under many numbers."""
    whole = isinstance(client, int) and not isinstance(client, bool) and client >= 0
    return bool(place) and whole and client % place["num-partitions"] == place["partition-id"]


def _apart(state: RecordDict) -> dict[str, RecordDict]:
    """What each client keeps, by the start of its keys in the node's state."""
    apart: dict[str, RecordDict] = {}
    for key, record in state.items():
        client, colon, own = key.partition(":")
        apart.setdefault(client + colon, RecordDict())[own] = record
    return apart
