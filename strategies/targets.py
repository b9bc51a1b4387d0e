"""The target networks of a hypernetwork: their arrays' shapes, and generated rows as models."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from clients.arrays import Arrays
from strategies.fedavg import weighted_mean
from strategies.replies import Node, Update


class Targets:
    """Target networks by name, from arrays of each; the one of a run of one size is named "".

    Arrays that are not floating point (counters) are not generated but averaged."""

    def __init__(self, networks: Mapping[str, Arrays]) -> None:
        self._real: dict[str, Arrays] = {}
        self.counters: dict[str, Arrays] = {}
        for network, arrays in networks.items():
            self._real[network] = {n: a for n, a in arrays.items() if a.dtype.kind == "f"}
            self.counters[network] = {n: a for n, a in arrays.items() if a.dtype.kind != "f"}

    @property
    def dtype(self) -> torch.dtype:
        """That of the generated arrays."""
        one = next(a for arrays in self._real.values() for a in arrays.values())
        return torch.from_numpy(np.zeros(0, one.dtype)).dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what is generated, by ``<network>/<array>``, or ``<array>`` of the only one."""
        return {
            f"{network}/{name}" if network else name: array.shape
            for network, arrays in self._real.items()
            for name, array in arrays.items()
        }

    def by_network(self, nodes: Sequence[Node]) -> dict[str, list[Node]]:
        """The nodes by their target network."""
        groups: dict[str, list[Node]] = {}
        for node in nodes:
            groups.setdefault(self._of(node), []).append(node)
        return groups

    def has(self, node: Node) -> bool:
        """Whether the node's network is one of them."""
        return self._of(node) in self._real

    def named(
        self, theta: Mapping[str, Tensor], nodes: Sequence[Node], network: str
    ) -> dict[Node, Arrays]:
        """Row i of every array as the model of node i, with its counters."""
        rows = {name: np.asarray(t.detach().numpy()) for name, t in theta.items()}
        return {
            node: {name: array[i] for name, array in rows.items()} | self.counters[network]
            for i, node in enumerate(nodes)
        }

    def average_counters(self, updates: Sequence[Update]) -> None:
        """The mean of the replies' counters, weighted by sample counts."""
        for network, counters in self.counters.items():
            own = [update for update in updates if self._of(update.node) == network]
            if counters and own:
                counts = [{n: u.arrays[n] for n in counters} for u in own]
                self.counters[network] = weighted_mean(counts, [u.num_examples for u in own])

    def _of(self, node: Node) -> str:
        return "" if "" in self._real else str(node.properties.get("model", ""))
