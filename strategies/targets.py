"""The target networks of a hypernetwork: what of them is generated, and generated rows as models.

Trainable weights alone are generated. Running statistics of normalisation layers, other buffers and
counters are the mean over the clients, weighted by sample counts, and are sent along: they
summarise inputs, no gradient reaches them, and a novel client has none of its own. Frozen
parameters stay as they are. A tied parameter is generated once."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from clients.arrays import Arrays, is_statistic, prefixed, settled
from clients.models.roles import roles_of
from strategies.fedavg import weighted_mean
from strategies.replies import Node, Update


class Targets:
    """Target networks by name, from arrays of each; the one of a run of one size is named "".

    The module in `modules` of the same name tells buffers, frozen and tied parameters; without one
    statistics are known by their names (see `clients.arrays.is_statistic`), and nothing is frozen
    or tied. Raises ValueError where nothing is left to generate."""

    def __init__(
        self,
        networks: Mapping[str, Arrays],
        modules: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._arrays = {network: dict(arrays) for network, arrays in networks.items()}
        self._learnt: dict[str, Arrays] = {}  # as templates
        self._tied: dict[str, Mapping[str, str]] = {}
        self.averaged: dict[str, Arrays] = {}
        for network, arrays in networks.items():
            module = (modules or {}).get(network)
            roles = None if module is None else roles_of(module)
            buffers, frozen = (roles.buffers, roles.frozen) if roles else ((), ())
            self._tied[network] = tied = roles.tied if roles else {}
            self.averaged[network] = averaged = {
                n: a for n, a in arrays.items() if n in buffers or is_statistic(n, a)
            }
            kept = {*averaged, *frozen, *tied}
            self._learnt[network] = {n: a for n, a in arrays.items() if n not in kept}
            if not self._learnt[network]:
                raise ValueError(
                    f"the network has no trainable weights that could be generated: {list(arrays)}"
                )

    @property
    def dtype(self) -> torch.dtype:
        """That of the generated arrays."""
        one = next(a for arrays in self._learnt.values() for a in arrays.values())
        return torch.from_numpy(np.zeros(0, one.dtype)).dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what is generated, by ``<network>/<array>``, or ``<array>`` of the only one."""
        return {
            f"{network}/{name}" if network else name: array.shape
            for network, arrays in self._learnt.items()
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
        return self._of(node) in self._arrays

    def named(
        self, theta: Mapping[str, Tensor], nodes: Sequence[Node], network: str
    ) -> dict[Node, Arrays]:
        """Row i of every array as the model of node i, in the network's own order."""
        rows = {name: np.asarray(t.detach().numpy()) for name, t in theta.items()}
        others = self._arrays[network] | self.averaged[network]
        tied = self._tied[network]
        models: dict[Node, Arrays] = {}
        for i, node in enumerate(nodes):
            own = {name: np.asarray(array[i]) for name, array in rows.items()}
            models[node] = {n: own.get(tied.get(n, n), others[n]) for n in others}
        return models

    def average(self, updates: Sequence[Update]) -> None:
        """The mean of the replies' arrays that are averaged, weighted by sample counts."""
        for network, last in self.averaged.items():
            own = [update for update in updates if self._of(update.node) == network]
            if last and own:
                told = [{n: u.arrays[n] for n in last} for u in own]
                mean = weighted_mean(told, [u.num_examples for u in own])
                self.averaged[network] = settled(mean, last)

    def averages(self) -> Arrays:
        """What `average` found, by ``<network>/<array>``, or ``<array>`` of the only one."""
        return {
            name: array
            for network, own in self.averaged.items()
            for name, array in (prefixed(network, own) if network else own).items()
        }

    def load(self, saved: Arrays) -> None:
        """Take back the `averages`; those that are not among them stay."""
        for network, own in self.averaged.items():
            start = f"{network}/" if network else ""
            self.averaged[network] = {n: saved.get(start + n, a) for n, a in own.items()}

    def _of(self, node: Node) -> str:
        return "" if "" in self._arrays else str(node.properties.get("model", ""))
