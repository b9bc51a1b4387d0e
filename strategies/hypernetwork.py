"""Hypernetworks: modules that generate the named arrays of a target network.

Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021, section 3."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class Hypernetwork(nn.Module):
    """h(v; φ): a fully connected trunk, then one linear head per array of the target network.

    As in the authors' code the trunk ends in a linear layer after its `hidden_layers` ReLU layers:
    the heads' inputs then have both signs, and clients interfere less.

    `shapes` are the arrays to generate. Several target networks share the trunk under names
    ``<network>/<array>``. Without hidden layers θ = W v + b, or θ = W v without `bias`. `spectral`
    normalises the largest singular value of every linear layer to 1."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        embedding_dim: int,
        hidden_dim: int = 100,
        hidden_layers: int = 3,
        *,
        spectral: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        normalise = spectral_norm if spectral else nn.Identity()
        layers: list[nn.Module] = []
        width = embedding_dim
        for _ in range(hidden_layers):
            layers += [normalise(nn.Linear(width, hidden_dim, bias=bias)), nn.ReLU()]
            width = hidden_dim
        if hidden_layers:
            layers.append(normalise(nn.Linear(width, hidden_dim, bias=bias)))
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(
            normalise(nn.Linear(width, torch.Size(shape).numel(), bias=bias))
            for shape in self.shapes.values()
        )

    def forward(self, v: Tensor, network: str = "") -> dict[str, Tensor]:
        """Arrays (m, *shape) by name, for m embeddings v (m, embedding_dim); with `network` only
        those of that target network."""
        features = self.trunk(v)
        start = f"{network}/" if network else ""
        return {
            name.removeprefix(start): head(features).view(len(v), *shape)
            for (name, shape), head in zip(self.shapes.items(), self.heads, strict=True)
            if name.startswith(start)
        }
