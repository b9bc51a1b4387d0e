"""The target networks of a hypernetwork: which arrays are generated, and models from them.

Only trainable weights are generated, a tied parameter once. Buffers, such as running statistics,
get no gradient and novel clients have none, so the server sends their mean over the clients,
weighted by sample counts. Frozen parameters do not change."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays, is_statistic, prefixed, settled
from clients.models.roles import roles_of
from strategies.core.aggregation import weighted_mean
from strategies.core.replies import Node, Update


class Targets:
    """Target networks by name, each with its arrays; the only one of a run is named "".

    `modules` tell buffers, frozen and tied parameters. Without a module, statistics are recognised
    by their names (see `clients.core.arrays.is_statistic`), and nothing is frozen or tied. Raises
    ValueError where nothing is left to generate."""

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
        """Of the generated arrays."""
        first = next(a for arrays in self._learnt.values() for a in arrays.values())
        return torch.from_numpy(np.zeros(0, first.dtype)).dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Generated shapes by ``<network>/<array>``, or ``<array>`` of the only network."""
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
        """Whether the node's network is known."""
        return self._of(node) in self._arrays

    def named(
        self, theta: Mapping[str, Tensor], nodes: Sequence[Node], network: str
    ) -> dict[Node, Arrays]:
        """Row i of every array as the model of node i, in the network's order."""
        rows = {name: np.asarray(t.detach().numpy()) for name, t in theta.items()}
        others, tied = self._arrays[network] | self.averaged[network], self._tied[network]
        models: dict[Node, Arrays] = {}
        for i, node in enumerate(nodes):
            generated = {name: np.asarray(array[i]) for name, array in rows.items()}
            models[node] = {n: generated.get(tied.get(n, n), others[n]) for n in others}
        return models

    def average(self, updates: Sequence[Update]) -> None:
        """Average the replies' buffers, weighted by sample counts."""
        for network, last in self.averaged.items():
            group = [update for update in updates if self._of(update.node) == network]
            if last and group:
                buffers = [{n: u.arrays[n] for n in last} for u in group]
                mean = weighted_mean(buffers, [u.num_examples for u in group])
                self.averaged[network] = settled(mean, last)

    def averages(self) -> Arrays:
        """The averaged buffers by ``<network>/<array>``, or ``<array>`` of the only network."""
        return {
            name: array
            for network, buffers in self.averaged.items()
            for name, array in (prefixed(network, buffers) if network else buffers).items()
        }

    def load(self, saved: Arrays) -> None:
        """Load saved `averages`; missing ones do not change."""
        for network, buffers in self.averaged.items():
            start = f"{network}/" if network else ""
            self.averaged[network] = {n: saved.get(start + n, a) for n, a in buffers.items()}

    def _of(self, node: Node) -> str:
        return "" if "" in self._arrays else str(node.properties.get("model", ""))
