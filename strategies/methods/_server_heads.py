"""Personal heads that the server holds, one for each training client, sent to it alone.

One reading of FedEmbed (Silva et al., 2022, sections 3.1 and 4.1), whose users noise "all
parameters, including unused model heads": this needs a server that holds all heads. A client gets
and returns its own head, which the server stores as ``held/<client>/<name>``. A reply leaves every
other head unchanged, and central noise is added to all heads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clients.core.arrays import Arrays, as_type, wide
from clients.core.protocol import HEADS
from strategies.core.replies import Node, Update
from strategies.core.strategy import PersonalizedStrategy

HELD = "held/"


class HeldHeads(PersonalizedStrategy):
    """`heads` says who holds the heads: the "client", or the "server".

    A head's arrays have the prefix `head` on the wire. A client starts from the initial head."""

    head = "head."
    heads = HEADS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.server_holds_heads = self.heads == "server"
        if self.server_holds_heads:
            self.uses_late_replies = False  # heads have other names here
        self._initial_head: Arrays = {}  # by its names on the wire
        self._wire_names: list[str] = []  # all names there, in the order of Flower's clipping

    def initialize(self, arrays: Arrays) -> Arrays:
        """The arrays without the head."""
        shared = dict(arrays)
        if self.server_holds_heads:
            self._wire_names = list(arrays)
            self._initial_head = {}
            for name in self._wire_names:
                if name.startswith(self.head):
                    self._initial_head[name] = shared.pop(name)
        return super().initialize(shared)

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The saved arrays, with the heads of the clients."""
        if not self.server_holds_heads:
            return super().restore(arrays, saved)
        heads = {name: a for name, a in saved.items() if name.startswith(HELD)}
        shared = {name: a for name, a in saved.items() if name not in heads}
        return super().restore(arrays, shared) | heads

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The shared arrays for every node, with its head if the server holds it."""
        if not self.server_holds_heads:
            return dict.fromkeys(nodes, arrays)
        models = {}
        for node in nodes:
            model = arrays | self._head_of(arrays, node)
            models[node] = {name: model[name] for name in self._wire_names}
        return models

    def to_server_names(
        self, updates: list[Update], sent: list[Arrays]
    ) -> tuple[list[Update], list[Arrays]]:
        """Under the server's names; the first reply also gets all heads of other clients."""
        if not self.server_holds_heads:
            return updates, sent
        heads: Arrays = {}
        for node in self.training_nodes():
            for name, array in self._head_of(self.arrays, node).items():
                heads[self._name(node, name)] = array
        self.arrays = self.arrays | heads
        # If Poisson sampling selected nobody, noise is still added to every head.
        if not updates:
            return updates, sent
        starts = []
        replies = []
        for update, start in zip(updates, sent, strict=True):
            starts.append(self._renamed(update.node, start))
            replies.append(replace(update, arrays=self._renamed(update.node, update.arrays)))
        other_heads = {}
        for name, array in self.arrays.items():
            if name.startswith(HELD) and name not in starts[0]:
                other_heads[name] = array
        starts[0] = starts[0] | other_heads
        replies[0] = replace(replies[0], arrays=replies[0].arrays | other_heads)
        return replies, starts

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
        if not self.server_holds_heads:
            return updates
        replies = []
        for update in updates:
            shared = {name: a for name, a in update.arrays.items() if not name.startswith(HELD)}
            replies.append(replace(update, arrays=shared))
        return replies

    def _head_of(self, arrays: Arrays, node: Node) -> Arrays:
        """A client's head by its names on the wire."""
        head = {}
        for name, initial in self._initial_head.items():
            head[name] = arrays.get(self._name(node, name), initial)
        return head

    def _renamed(self, node: Node, arrays: Arrays) -> Arrays:
        """A client's arrays under the server's names."""
        renamed = {}
        for name, array in arrays.items():
            in_head = name in self._initial_head
            renamed[self._name(node, name) if in_head else name] = array
        return renamed

    @staticmethod
    def _name(node: Node, name: str) -> str:
        return f"{HELD}{node.client}/{name}"
