"""The target networks of a hypernetwork: which arrays are generated, and models from them.

Only trainable weights are generated, a tied parameter once. Buffers, such as running statistics,
get no gradient and novel clients have none, so the server sends their mean over the clients,
weighted by sample counts. Frozen parameters do not change."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays, as_type, is_statistic, prefixed, settled, wide
from clients.models.roles import Roles, roles_of
from strategies.core.aggregation import weighted_mean
from strategies.core.replies import Node, Update
from strategies.core.run_state import check_names

OTHER_WAYS = (
    "pass network=Net(), whose state_dict has arrays of the same number and shapes, or "
    "buffers=('4', '5'), the names of those that are no weights, () if there are none; or "
)
SHOWN = 5  # names of arrays in a message


class Targets:
    """Target networks by name, each with its arrays; the only one of a run is named "".

    `modules` tell buffers, frozen and tied parameters. Their arrays have the networks' names, or
    the same number and shapes where arrays are named by number. Without a module `buffers` names
    what is averaged; without either, statistics are recognised by their names (see
    `clients.core.arrays.is_statistic`), and nothing is frozen or tied. Raises ValueError where
    modules or `buffers` fit no network, where statistics cannot be recognised, and where nothing is
    left to generate."""

    def __init__(
        self,
        networks: Mapping[str, Arrays],
        modules: Mapping[str, nn.Module] | None = None,
        buffers: Sequence[str] | None = None,
        strategy: str = "PFedHN",
    ) -> None:
        modules = modules or {}
        _check_networks(networks, modules)
        _check_buffers(networks, modules, buffers)
        self._arrays = {network: dict(arrays) for network, arrays in networks.items()}
        self._learnt: dict[str, Arrays] = {}  # as templates
        self._tied: dict[str, Mapping[str, str]] = {}
        self.averaged: dict[str, Arrays] = {}
        for network, arrays in networks.items():
            if network in modules:
                roles = _named_roles(modules[network], arrays, network)
            else:
                if buffers is None:
                    check_names(arrays, strategy, OTHER_WAYS)
                roles = Roles(frozenset(buffers or ()), frozenset(), {})
            self._tied[network] = roles.tied
            self.averaged[network] = averaged = {
                n: a for n, a in arrays.items() if n in roles.buffers or is_statistic(n, a)
            }
            kept = {*averaged, *roles.frozen, *roles.tied}
            self._learnt[network] = {n: a for n, a in arrays.items() if n not in kept}
            if not self._learnt[network]:
                raise ValueError(
                    "the network has no trainable weights that could be generated; buffers, "
                    f"frozen or tied are {', '.join(arrays):.500}"
                )

    @property
    def dtype(self) -> torch.dtype:
        """In which arrays are generated: that of the networks, float32 at least."""
        first = next(a for arrays in self._learnt.values() for a in arrays.values())
        return torch.from_numpy(wide(np.zeros(0, first.dtype))).dtype

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
        """Row i of every array as the model of node i, in the network's order and dtypes."""
        learnt = self._learnt[network]
        rows = {name: as_type(t.detach().numpy(), learnt[name].dtype) for name, t in theta.items()}
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


def _check_networks(networks: Mapping[str, Arrays], modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for a module of no network."""
    if unknown := sorted(modules.keys() - networks.keys()):
        names = ", ".join(name or "one network without a name" for name in networks)
        given = unknown[0] or "one module"
        raise ValueError(f"network= is {given}, but the arrays are those of {names}: give a module "
                         "for each by its name, as models= has them")  # fmt: skip


def _check_buffers(
    networks: Mapping[str, Arrays],
    modules: Mapping[str, nn.Module],
    buffers: Sequence[str] | None,
) -> None:
    """Raise ValueError for `buffers` that are no arrays, or beside a module, which tells them."""
    if buffers is None:
        return
    if isinstance(buffers, str):
        raise ValueError(f"buffers= is {buffers!r:.80}; give a tuple of names, ({buffers!r:.80},)")
    if modules:
        raise ValueError("network= tells which arrays are buffers; leave out buffers=")
    known = {name for arrays in networks.values() for name in arrays}
    if unknown := sorted(set(map(str, buffers)) - known):
        raise ValueError(
            f"buffers= names {unknown[0]!r}, which is no array: {', '.join(sorted(known)):.500}"
        )


def _named_roles(module: nn.Module, arrays: Arrays, network: str) -> Roles:
    """The roles of the module's arrays, under the names of `arrays`. Raises ValueError if neither
    names nor, where names are numbers, number and shapes are the same."""
    roles = roles_of(module)
    listed = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    if all(listed.get(name) == shape for name, shape in shapes.items()):
        return roles
    numbered = all(name.isdecimal() for name in arrays)
    if numbered and list(listed.values()) == list(shapes.values()):
        place = dict(zip(listed, arrays, strict=True))
        return Roles(
            frozenset(place[name] for name in roles.buffers),
            frozenset(place[name] for name in roles.frozen),
            {place[name]: place[same] for name, same in roles.tied.items()},
        )
    expected = listed
    if numbered:  # by their places
        expected = dict(zip(arrays, listed.values(), strict=False))
    other = [f"{n} {shape}" for n, shape in shapes.items() if expected.get(n) != shape]
    other = other or [f"{len(arrays)} arrays"]
    fits = ", ".join(f"{name} {shape}" for name, shape in listed.items())
    raise ValueError(
        f"network= is {type(module).__name__}, which does not fit the arrays"
        f"{f' of {network!r}' if network else ''}: {', '.join(other[:SHOWN])} are not among its "
        f"own: {fits:.500}; pass the clients' network, or arrays as its state_dict lists them"
    )
