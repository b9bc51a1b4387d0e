"""Personal heads that the server holds, one for each training client, sent to it alone.

One reading of FedEmbed (Silva et al., 2022, sections 3.1 and 4.1), whose users noise "all
parameters, including unused model heads": this needs a server that holds all heads. A client gets
and returns its own head, which the server stores as ``held/<client>/<name>``. A reply counts as one
that leaves every other head unchanged, so that central noise is added to all of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clients.core.arrays import Arrays, as_type, wide
from clients.core.protocol import HEADS
from strategies.core.replies import Node, Update
from strategies.core.rounds import PersonalizedStrategy

HELD = "held/"


class HeldHeads(PersonalizedStrategy):
    """`heads` says who holds the heads: the "client", or the "server".

    A head's arrays have the prefix `head` on the wire. A client starts from the initial head."""

    head = "head."
    heads = HEADS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.holds = self.heads == "server"
        self._initial_head: Arrays = {}  # by its names on the wire
        self._wire: list[str] = []  # all names there, in the order that Flower's clipping needs

    def initialize(self, arrays: Arrays) -> Arrays:
        """The arrays without the head."""
        if self.holds:
            self._wire = list(arrays)
            self._initial_head = {n: a for n, a in arrays.items() if n.startswith(self.head)}
        return super().initialize({n: a for n, a in arrays.items() if n not in self._initial_head})

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The saved arrays, with the heads of the clients."""
        held = {name: a for name, a in saved.items() if name.startswith(HELD) and self.holds}
        rest = {name: a for name, a in saved.items() if name not in held}
        return super().restore(arrays, rest) | held

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The shared arrays for every node, with its head if the server holds it."""
        if not self.holds:
            return dict.fromkeys(nodes, arrays)
        models = {node: arrays | self._head_of(arrays, node) for node in nodes}
        return {node: {n: model[n] for n in self._wire} for node, model in models.items()}

    def to_server_names(
        self, updates: list[Update], sent: list[Arrays]
    ) -> tuple[list[Update], list[Arrays]]:
        """Under the server's names; the first reply also gets all heads that nobody used."""
        if not self.holds:
            return updates, sent
        self.arrays = self.arrays | {
            self._name(node, name): array
            for node in self.training_nodes()
            for name, array in self._head_of(self.arrays, node).items()
        }
        # If Poisson sampling selected nobody, noise is still added to every head.
        if not updates:
            return updates, sent
        starts = [self._renamed(u.node, x) for u, x in zip(updates, sent, strict=True)]
        replies = [replace(u, arrays=self._renamed(u.node, u.arrays)) for u in updates]
        unused = {n: a for n, a in self.arrays.items() if n.startswith(HELD) and n not in starts[0]}
        replies[0] = replace(replies[0], arrays=replies[0].arrays | unused)
        return replies, [starts[0] | unused, *starts[1:]]

    def mean_changes(self, arrays: Arrays, updates: Sequence[Update]) -> Arrays:
        """The mean change of every head over all users of the round; other users' heads change
        by zero."""
        total: Arrays = {}
        for update in updates:
            for name, array in update.arrays.items():
                if name.startswith(HELD):
                    change = wide(array) - arrays[name]
                    total[name] = total.get(name, 0) + change / len(updates)
        return total

    def stored(self, arrays: Arrays, updates: Sequence[Update]) -> Arrays:
        """The heads with their users' changes, which are noisy in a private run."""
        users = float(len(updates))
        if self.privacy is not None and self.privacy.hides_participants:
            users = self.privacy.expected  # the denominator of its mean
        heads: Arrays = {}
        for name, change in self.mean_changes(arrays, updates).items():
            moved = arrays[name] + change.dtype.type(users) * change
            heads[name] = as_type(moved, arrays[name].dtype)
        return heads

    def shared(self, updates: list[Update]) -> list[Update]:
        """The replies without heads."""
        if not self.holds:
            return updates
        return [
            replace(u, arrays={n: a for n, a in u.arrays.items() if not n.startswith(HELD)})
            for u in updates
        ]

    def _head_of(self, arrays: Arrays, node: Node) -> Arrays:
        """A client's head by its names on the wire."""
        initial = self._initial_head
        return {name: arrays.get(self._name(node, name), a) for name, a in initial.items()}

    def _renamed(self, node: Node, arrays: Arrays) -> Arrays:
        head = self._initial_head
        return {self._name(node, n) if n in head else n: a for n, a in arrays.items()}

    @staticmethod
    def _name(node: Node, name: str) -> str:
        return f"{HELD}{node.client}/{name}"
