"""Hypernetworks: modules that generate the named arrays of a target network.

Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021, section 3; chunks:
von Oswald et al., Continual learning with hypernetworks, ICLR 2020, section 2.3."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

CHUNK_DIM = 32  # entries of c_k


class Hypernetwork(nn.Module):
    """h(v; φ): a fully connected trunk, then one linear head per array of the target network.

    As in the authors' code the trunk ends in a linear layer after its `hidden_layers` ReLU layers:
    the heads' inputs then have both signs, and clients interfere less.

    `shapes` are the arrays to generate. Several target networks share the trunk under names
    ``<network>/<array>``. Without hidden layers θ = W v + b, or θ = W v without `bias`. `spectral`
    normalises the largest singular value of every linear layer to 1.

    With `chunk` > 0 one head generates that many weights at a time, for the trunk at (v, c_k), with
    a learnt c_k for each chunk: φ does not grow with `hidden_dim` × the generated weights."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        embedding_dim: int,
        hidden_dim: int = 100,
        hidden_layers: int = 3,
        *,
        spectral: bool = False,
        bias: bool = True,
        chunk: int = 0,
    ) -> None:
        super().__init__()
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        normalise = spectral_norm if spectral else nn.Identity()
        layers: list[nn.Module] = []
        width, sizes = embedding_dim, [shape.numel() for shape in self.shapes.values()]
        self._chunk = chunk
        if chunk:  # c_k
            self.chunks = nn.Parameter(torch.randn(-(-sum(sizes) // chunk), CHUNK_DIM))
            width, sizes = width + CHUNK_DIM, [chunk]
        for _ in range(hidden_layers):
            layers += [normalise(nn.Linear(width, hidden_dim, bias=bias)), nn.ReLU()]
            width = hidden_dim
        if hidden_layers:
            layers.append(normalise(nn.Linear(width, hidden_dim, bias=bias)))
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(normalise(nn.Linear(width, size, bias=bias)) for size in sizes)

    def forward(self, v: Tensor, network: str = "") -> dict[str, Tensor]:
        """Arrays (m, *shape) by name, for m embeddings v (m, embedding_dim); with `network` only
        those of that target network."""
        start = f"{network}/" if network else ""
        arrays = self._by_chunk(v, start) if self._chunk else self._by_array(v, start)
        return {
            name.removeprefix(start): array.view(len(v), *self.shapes[name])
            for name, array in arrays
        }

    def _by_array(self, v: Tensor, start: str) -> Iterator[tuple[str, Tensor]]:
        features = self.trunk(v)
        for name, head in zip(self.shapes, self.heads, strict=True):
            if name.startswith(start):
                yield name, head(features)

    def _by_chunk(self, v: Tensor, start: str) -> Iterator[tuple[str, Tensor]]:
        """From the chunks that hold arrays of the network."""
        ends = dict(
            zip(self.shapes, accumulate(s.numel() for s in self.shapes.values()), strict=True)
        )
        names = [name for name in ends if name.startswith(start)]
        begin, end = ends[names[0]] - self.shapes[names[0]].numel(), ends[names[-1]]
        codes = self.chunks[begin // self._chunk : -(-end // self._chunk)]
        inputs = [v[:, None].expand(-1, len(codes), -1), codes.expand(len(v), -1, -1)]
        flat = self.heads[0](self.trunk(torch.cat(inputs, -1))).flatten(1)
        before, sizes = begin % self._chunk, [self.shapes[name].numel() for name in names]
        after = flat.shape[1] - before - sum(sizes)
        yield from zip(names, flat.split([before, *sizes, after], 1)[1:-1], strict=True)
