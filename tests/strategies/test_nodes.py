"""Nodes as columns: the list that strategies see, and the roster's table."""

import random

import pytest

from strategies.core.nodes import LARGEST_GAP, Nodes, NodeTable, NumberByKey
from strategies.core.replies import Node


def table(*nodes):
    """A table of these nodes, all present."""
    admitted = NodeTable()
    for node in nodes:
        admitted.add(node)
    return admitted


NOVEL = {"num-examples": 3}
THREE = [Node(0, 2**63 + 5), Node(4, 8, novel=True, properties=NOVEL), Node(7, 9, foreign=True)]


def test_nodes_are_a_list_that_makes_them_when_they_are_read():
    columns, others = table(*THREE[::-1]).holders()
    nodes = Nodes.of(columns)
    assert not others and len(nodes) == 3
    assert list(nodes) == THREE == [nodes[0], nodes[1], nodes[-1]]
    assert nodes[1:] == THREE[1:] and [nodes[9:], nodes[::2]] == [[], THREE[::2]]
    assert [(n.properties, n.foreign) for n in nodes] == [({}, False), (NOVEL, False), ({}, True)]
    assert THREE[1] in nodes and Node(4, 8) not in nodes
    assert list(nodes.clients) == [0, 4, 7]
    assert list(nodes.of_kinds(lambda node: not node.novel)) == THREE[::2]
    assert nodes.columns is columns
    with pytest.raises(IndexError):
        nodes[3]
    copied = nodes.copy()
    copied.append(Node(9, 10))  # from here on it is a plain list
    assert copied == [*THREE, Node(9, 10)] and list(copied.clients) == [0, 4, 7, 9]
    assert list(copied.of_kinds(lambda node: node.novel)) == THREE[1:2]
    more = [Node(9, 10)]
    assert nodes + more == copied and nodes == THREE
    nodes.clear()
    assert not nodes and len(copied) == 4


def test_a_million_nodes_take_fifty_bytes_each():
    """Measured by their columns: 24 bytes in the table, 20 in the list, 9 in the two indices."""
    admitted = table(*(Node(i, i + 1) for i in range(1000)))
    columns, _ = admitted.holders()
    arrays = (columns.clients, columns.ids, columns.kind_numbers)
    assert sum(array.nbytes for array in arrays) == 20 * 1000
    assert len(admitted._rows._numbers) == 1001 and not admitted._rows._others
    assert len(admitted._kinds) == 1


def test_numbers_are_found_by_keys_of_any_distance():
    numbers = NumberByKey()
    far = LARGEST_GAP + 9
    expected = {far: 7, 3: 0, 1: 1, 0: 2, far - 6: 3, far - 5: 4, 2**64 - 1: 5, 5: 6, far + 1: 8}
    for key, number in expected.items():
        assert numbers.get(key) is None
        numbers.set(key, number)
    assert {key: numbers.get(key) for key in expected} == expected
    assert numbers.get(2) is numbers.get(-1) is numbers.get(2**40) is None
    assert set(numbers._others) == {far, 2**64 - 1}


def test_a_table_agrees_with_dicts_whoever_joins_and_leaves():
    """The holder of a client is its first node, or else who is there for the longest time."""
    draws = random.Random(0)
    admitted = NodeTable()
    present, first = {}, {}
    for _ in range(2000):
        node = Node(draws.randrange(4), draws.randrange(50, 60))
        before = admitted.by_id(node.id)
        if node.id in present:
            admitted.remove(node.id)
            del present[node.id]
        elif before is None or before.client == node.client:
            admitted.add(node)
            present[node.id] = node
            first.setdefault(node.client, node)
        holders = {n.client: n for n in present.values() if first[n.client].id == n.id}
        for other in present.values():
            holders.setdefault(other.client, other)
        columns, others = admitted.holders()
        assert list(Nodes.of(columns)) == sorted(holders.values())
        expected = {n.id: holders[n.client].id for n in present.values() if n not in
                    holders.values()}  # fmt: skip
        assert {node.id: holder.id for node, holder in others} == expected
        assert admitted.num_present == len(present) == len(list(admitted.present_ids()))
        assert all(admitted.by_client(client) == node for client, node in first.items())
