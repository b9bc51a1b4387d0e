"""The nodes of a run as columns of numbers, so that a million of them take little memory.

A node costs tens of bytes here, where an object in dicts by id costs hundreds. What nodes have in
common, such as their role and properties, is stored once, as a `Kind`."""

from array import array
from collections import UserList
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from clients.core.protocol import CLIENT
from strategies.core.replies import Node

LARGEST_GAP = 10_000  # of keys in an array by key: keys further apart go into a dict
ABSENT = -1


class Kind(NamedTuple):
    """What nodes have in common: all that `Node` holds beside its two ids."""

    novel: bool
    properties: Mapping[str, Any]
    foreign: bool

    def node(self, client: int, node_id: int) -> Node:
        """The node of this kind with these ids."""
        return Node(client, node_id, self.novel, self.properties, self.foreign)


class Columns(NamedTuple):
    """Nodes, one after the other: ids of clients and of nodes (n,), positions (n,) in `kinds`."""

    clients: np.ndarray
    ids: np.ndarray
    kind_numbers: np.ndarray
    kinds: tuple[Kind, ...]

    def node(self, row: int) -> Node:
        """The node in a row."""
        kind = self.kinds[self.kind_numbers[row]]
        return kind.node(int(self.clients[row]), int(self.ids[row]))

    def take(self, rows: np.ndarray) -> "Columns":
        """The nodes of these rows, given by number or by a mask."""
        return Columns(self.clients[rows], self.ids[rows], self.kind_numbers[rows], self.kinds)

    def of_kinds(self, is_wanted: Callable[[Node], bool]) -> "Columns":
        """The nodes of the kinds for which `is_wanted` says so of a node; it may not read ids."""
        wanted = [is_wanted(kind.node(ABSENT, ABSENT)) for kind in self.kinds]
        if all(wanted):
            return self
        return self.take(np.array(wanted)[self.kind_numbers])


class Nodes(UserList[Node]):
    """A list of nodes. Those that the roster gives are made when they are read, until the list is
    changed."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.columns: Columns | None = None  # None: the nodes are in `_list`
        self._list: list[Node] = list(nodes)

    @classmethod
    def of(cls, columns: Columns) -> Self:
        """The nodes in `columns`."""
        nodes = cls()
        nodes.columns = columns
        return nodes

    @property
    def data(self) -> list[Node]:
        """All nodes as a list, for whatever changes it."""
        if self.columns is not None:
            self._list = list(self)
            self.columns = None
        return self._list

    @data.setter
    def data(self, nodes: list[Node]) -> None:
        self._list = nodes
        self.columns = None

    def __len__(self) -> int:
        return len(self._list if self.columns is None else self.columns.ids)

    def __iter__(self) -> Iterator[Node]:
        if self.columns is None:
            return iter(self._list)
        return map(self.columns.node, range(len(self)))

    def __getitem__(self, place: Any) -> Any:
        if self.columns is None:
            return self._list[place]
        rows = range(len(self))[place]
        if isinstance(rows, range):
            return [self.columns.node(row) for row in rows]
        return self.columns.node(rows)

    def __contains__(self, node: object) -> bool:
        return any(node == other for other in self)

    def __copy__(self) -> "Nodes":
        return self.copy()

    def copy(self) -> "Nodes":
        """The same nodes in a list of its own."""
        if self.columns is None:
            return Nodes(self._list)
        return Nodes.of(self.columns)

    @property
    def clients(self) -> Iterable[int]:
        """The ids of their clients."""
        if self.columns is None:
            return [node.client for node in self._list]
        return map(int, self.columns.clients)

    def of_kinds(self, is_wanted: Callable[[Node], bool]) -> "Nodes":
        """The nodes for which `is_wanted` says so; it may not read a node's ids."""
        if self.columns is None:
            return Nodes(filter(is_wanted, self._list))
        return Nodes.of(self.columns.of_kinds(is_wanted))


def as_nodes(nodes: Iterable[Node]) -> Nodes:
    """The same nodes, for lists that a test or a strategy made itself."""
    return nodes if isinstance(nodes, Nodes) else Nodes(nodes)


class NumberByKey:
    """A number ≥ 0 for each key, a whole number. Keys without large gaps, as a simulation has, take
    4 bytes each, others an entry of a dict."""

    def __init__(self) -> None:
        self._numbers = array("i")  # by key
        self._others: dict[int, int] = {}

    def get(self, key: int) -> int | None:
        """The number of a key, None if it has none."""
        if 0 <= key < len(self._numbers):
            number = self._numbers[key]
            if number != ABSENT:
                return number
        return self._others.get(key)

    def set(self, key: int, number: int) -> None:
        """Give a key its number."""
        gap = key - len(self._numbers)
        if key < 0 or gap >= LARGEST_GAP or key in self._others:
            self._others[key] = number
            return
        if gap >= 0:
            self._numbers.extend([ABSENT] * (gap + 1))
        self._numbers[key] = number


class NodeTable:
    """Every node that was admitted, in the order of the first time, and whether it is present."""

    def __init__(self) -> None:
        self._clients = array("Q")
        self._ids = array("Q")
        self._kind_numbers = array("i")
        self._present = bytearray()
        # Rows of present nodes whose client id an earlier node gave, in the order of their coming.
        self._later: dict[int, None] = {}
        self._rows = NumberByKey()  # by node id
        self._first_rows = NumberByKey()  # by client id
        self._kinds: dict[str, int] = {}  # number of a kind, by its text
        self._kinds_by_number: list[Kind] = []
        self.num_present = 0

    def by_id(self, node_id: int) -> Node | None:
        """The node as it was admitted last, present or not."""
        return self._node(self._rows.get(node_id))

    def by_client(self, client: int) -> Node | None:
        """The first node that gave this client id, present or not."""
        return self._node(self._first_rows.get(client))

    def is_present(self, node_id: int) -> bool:
        """Whether the node is present."""
        row = self._rows.get(node_id)
        return row is not None and bool(self._present[row])

    def present_ids(self) -> Iterator[int]:
        """The ids of the nodes that are present."""
        for node_id, present in zip(self._ids, self._present, strict=True):
            if present:
                yield node_id

    def add(self, node: Node) -> None:
        """Add a node, or let one that was there before be present again, as it is now."""
        row = self._rows.get(node.id)
        kind_number = self._kind_number(node)
        if row is not None:
            self._kind_numbers[row] = kind_number
        else:
            row = len(self._ids)
            self._rows.set(node.id, row)
            self._clients.append(node.client)
            self._ids.append(node.id)
            self._kind_numbers.append(kind_number)
            self._present.append(False)
            if self._first_rows.get(node.client) is None:
                self._first_rows.set(node.client, row)
        if not self._present[row]:
            self._present[row] = True
            self.num_present += 1
            if self._first_rows.get(node.client) != row:
                self._later[row] = None

    def remove(self, node_id: int) -> None:
        """Let a node that is present be absent."""
        row = self._rows.get(node_id)
        assert row is not None
        self._present[row] = False
        self.num_present -= 1
        self._later.pop(row, None)

    def holders(self) -> tuple[Columns, list[tuple[Node, Node]]]:
        """One node for each client that is present, by client id: the first that gave the id, if it
        is present. And the other nodes that are present, each with its client's."""
        is_holder = np.array(self._present, bool)
        is_holder[list(self._later)] = False
        others = []
        substitutes: dict[int, int] = {}  # rows of holders whose client's first node is absent
        for row in self._later:
            client = self._clients[row]
            holder = self._first_rows.get(client)
            assert holder is not None
            if not self._present[holder]:
                holder = substitutes.setdefault(client, row)
            if holder != row:
                others.append((self._made(row), self._made(holder)))
        is_holder[list(substitutes.values())] = True
        columns = self._columns.take(is_holder)
        return columns.take(np.argsort(columns.clients)), others

    @property
    def _columns(self) -> Columns:
        # Copied: an array that numpy looks into cannot grow.
        return Columns(
            np.array(self._clients),
            np.array(self._ids),
            np.array(self._kind_numbers),
            tuple(self._kinds_by_number),
        )

    def _node(self, row: int | None) -> Node | None:
        return None if row is None else self._made(row)

    def _made(self, row: int) -> Node:
        kind = self._kinds_by_number[self._kind_numbers[row]]
        return kind.node(self._clients[row], self._ids[row])

    def _kind_number(self, node: Node) -> int:
        """The number of the node's kind. The client id, which no two share, is no part of it."""
        properties = {name: value for name, value in node.properties.items() if name != CLIENT}
        kind = Kind(node.novel, properties, node.foreign)
        text = repr((kind.novel, kind.foreign, sorted(properties.items())))
        number = self._kinds.setdefault(text, len(self._kinds))
        if number == len(self._kinds_by_number):
            self._kinds_by_number.append(kind)
        return number
