"""Hypernetworks: modules that generate the named arrays of a target network.

Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021, section 3. Chunks
are from von Oswald et al., Continual learning with hypernetworks, ICLR 2020, section 2.3."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

CHUNK_DIM = 32  # entries of a chunk's embedding c_k


class Hypernetwork(nn.Module):
    """h(v; φ): a fully connected trunk, then one linear head per array of the target network.

    As in the authors' code the trunk ends in a linear layer after its `hidden_layers` ReLU layers:
    the heads' inputs then have both signs, and clients interfere less.

    `shapes` are the shapes of the arrays to generate, by name. Several target networks can share
    the trunk; their names are ``<network>/<array>``. Without hidden layers θ = W v + b, or θ = W v
    without `bias`. `spectral` normalises the largest singular value of every linear layer to 1.

    With `chunk` > 0 a single head generates this many weights at a time. The trunk's input is then
    (v, c_k) with a learnt embedding c_k for each chunk, so φ does not grow with `hidden_dim` × the
    number of generated weights."""

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
        width = embedding_dim
        head_sizes = [shape.numel() for shape in self.shapes.values()]
        self._chunk = chunk
        if chunk:
            count = math.ceil(sum(head_sizes) / chunk)
            self.chunks = nn.Parameter(torch.randn(count, CHUNK_DIM))  # row k is c_k
            width += CHUNK_DIM
            head_sizes = [chunk]
        for _ in range(hidden_layers):
            layers += [normalise(nn.Linear(width, hidden_dim, bias=bias)), nn.ReLU()]
            width = hidden_dim
        if hidden_layers:
            layers.append(normalise(nn.Linear(width, hidden_dim, bias=bias)))
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList()
        for size in head_sizes:
            self.heads.append(normalise(nn.Linear(width, size, bias=bias)))

    def forward(self, v: Tensor, network: str = "") -> dict[str, Tensor]:
        """Arrays (m, *shape) by name, for m embeddings v (m, embedding_dim).

        With `network` only the arrays of that target network, under their names in it."""
        prefix = f"{network}/" if network else ""
        arrays = self._by_chunk(v, prefix) if self._chunk else self._by_array(v, prefix)
        generated: dict[str, Tensor] = {}
        for name, flat in arrays:
            generated[name.removeprefix(prefix)] = flat.view(len(v), *self.shapes[name])
        return generated

    def _by_array(self, v: Tensor, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Flat arrays (m, size) from one head each."""
        features = self.trunk(v)
        for name, head in zip(self.shapes, self.heads, strict=True):
            if name.startswith(prefix):
                yield name, head(features)

    def _by_chunk(self, v: Tensor, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Flat arrays (m, size) from the chunks that hold them.

        All arrays, one after the other, are cut into chunks; those of a network are adjacent."""
        names: list[str] = []
        sizes: list[int] = []
        begin = 0  # position of the network's first weight
        for name, shape in self.shapes.items():
            if name.startswith(prefix):
                names.append(name)
                sizes.append(shape.numel())
            elif not names:
                begin += shape.numel()
        end = begin + sum(sizes)
        first_chunk = begin // self._chunk
        codes = self.chunks[first_chunk : math.ceil(end / self._chunk)]

        # The trunk gets every pair of an embedding and a chunk: (m, chunks, width).
        inputs = [v[:, None].expand(-1, len(codes), -1), codes.expand(len(v), -1, -1)]
        flat = self.heads[0](self.trunk(torch.cat(inputs, -1))).flatten(1)
        before = begin - first_chunk * self._chunk  # weights of other networks in the first chunk
        after = flat.shape[1] - before - sum(sizes)
        arrays = flat.split([before, *sizes, after], 1)[1:-1]
        yield from zip(names, arrays, strict=True)
