"""Client encoders g(·; γ): a set of inputs (n, *shape) → its descriptor (d,).

Amosy et al., On-Demand Unlabeled Personalized Federated Learning: section 4 and supplement C.
Images go through convolutions like the target network's; other inputs, and images whose target
network has none, through fully connected layers of 500. The pooled units of all layers are
concatenated, and two fully connected layers follow (ours: the text leaves it open)."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.models.networks import channels_last, convolved, pooled

POOLED = 200  # units that are pooled after each convolution: half by mean, half by maximum
WIDTH = 500  # of fully connected layers for features
INNER = (120, 84)  # fully connected layers after the convolutions, as LeNet's
Shape = tuple[int, ...]


class Encoder(nn.Module):
    """The base of all encoders; the last linear layer `out` gives the descriptor (d,)."""

    out: nn.Linear

    def sensitivity(self, n: int) -> float:
        """Δ: the largest change of the descriptor, in Euclidean norm, by replacing one of n inputs.

        Raises ValueError where no bound is known."""
        raise ValueError(
            f"encoder {NAMES[type(self)]!r} has no bounded sensitivity, so it cannot be made "
            "private; with descriptor-epsilon use encoder 'ds-sphere'"
        )


class MeanMax(nn.Module):
    """fc `units`; the first half is mean-, the other max-pooled over the set: (n, …) → (units,)."""

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, units)
        self.by_mean = units // 2

    def forward(self, x: Tensor) -> Tensor:
        """Pooled units of x (n, …), flattened per sample."""
        h = F.relu(self.fc(x.flatten(1)))
        return torch.cat([h[:, : self.by_mean].mean(0), h[:, self.by_mean :].amax(0)])


class DeepSets(Encoder):
    """`ds` (Zaheer et al., 2017): a pooled layer after each convolution, or fc 500 for features."""

    def __init__(self, target: nn.Module, shape: Shape, dim: int) -> None:
        super().__init__()
        self.convolutions = _convolutions(target, shape)
        sizes = _sizes(self.convolutions, shape)
        if self.convolutions:
            units = POOLED
            widths: tuple[int, ...] = INNER
        else:
            units = WIDTH
            widths = (WIDTH,)
        self.pools = nn.ModuleList(MeanMax(size, units) for size in sizes)
        # The pooled units of all layers are concatenated.
        self.fc = _fully_connected((units * len(sizes), *widths))
        self.out = nn.Linear(widths[-1], dim)

    def forward(self, x: Tensor) -> Tensor:
        """g({x}; γ)."""
        layers = []
        for convolution in self.convolutions:
            x = convolved(x, convolution)
            layers.append(x)
        if not layers:
            layers = [x]  # features are pooled as they are
        units = []
        for pool, layer in zip(self.pools, layers, strict=True):
            units.append(pool(layer))
        return self.out(self.fc(torch.cat(units)))


class DeepSymmetricSets(Encoder):
    """`dss` (Maron et al., 2020): every layer is L1(x_j) + L2(Σ_k x_k / n), then mean and max."""

    def __init__(self, target: nn.Module, shape: Shape, dim: int) -> None:
        super().__init__()
        self.siamese = _convolutions(target, shape)
        self.aggregated = _convolutions(target, shape)
        self.images = bool(self.siamese)
        if self.images:
            size = _sizes(self.siamese, shape)[-1]
            units = POOLED
            widths: tuple[int, ...] = INNER
        else:
            features = torch.Size(shape).numel()
            self.siamese = nn.ModuleList([nn.Linear(features, WIDTH)])
            self.aggregated = nn.ModuleList([nn.Linear(features, WIDTH)])
            size = WIDTH
            units = WIDTH
            widths = (WIDTH,)
        self.pool = MeanMax(size, units)
        self.fc = _fully_connected((units, *widths))
        self.out = nn.Linear(widths[-1], dim)

    def forward(self, x: Tensor) -> Tensor:
        """g({x}; γ)."""
        x = channels_last(x) if self.images else x.flatten(1)
        for each, mean in zip(self.siamese, self.aggregated, strict=True):
            x = each(x) + mean(x.mean(0, keepdim=True))
            if self.images:
                x = pooled(x)
            x = F.relu(x)
        return self.out(self.fc(self.pool(x)))


class SetTransformer(Encoder):
    """`st` (Lee et al., 2019): features of each sample, two induced self-attention blocks,
    pooling by multi-head attention, a linear layer."""

    def __init__(self, target: nn.Module, shape: Shape, dim: int) -> None:
        super().__init__()
        width = 128
        heads = 4
        self.convolutions = _convolutions(target, shape)
        self.embed = nn.Linear(_sizes(self.convolutions, shape)[-1], width)
        # Inducing points of the first and the second self-attention block, and the seed.
        self.points = nn.ParameterList()
        for count in (16, 16, 1):
            points = nn.init.xavier_uniform_(torch.empty(count, width))
            self.points.append(nn.Parameter(points))
        # Two for each self-attention block, and one that pools.
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(5))
        self.out = nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        """g({x}; γ)."""
        x = convolved(x, *self.convolutions)
        h = F.relu(self.embed(x.flatten(1)))
        first, second, seed = self.points
        h = self.blocks[1](h, self.blocks[0](first, h))  # ISAB(h) = MAB(h, MAB(I, h))
        h = self.blocks[3](h, self.blocks[2](second, h))
        return self.out(self.blocks[4](seed, h)[0])


class AttentionBlock(nn.Module):
    """MAB(x, y) = h + rFF(h), h = x + Multihead(x, y, y); x (a, width), y (b, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads)
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(a, width)."""
        h = x + self.attention(x, y, y, need_weights=False)[0]
        return h + F.relu(self.fc(h))


class MeanSets(Encoder):
    """`mean` (Scott et al., PeFLL): the mean over the set of φ(x_j), its convolutions and fully
    connected layers of `widths`."""

    def __init__(
        self, target: nn.Module, shape: Shape, dim: int, widths: tuple[int, ...] = INNER
    ) -> None:
        super().__init__()
        self.convolutions = _convolutions(target, shape)
        self.fc = _fully_connected((_sizes(self.convolutions, shape)[-1], *widths))
        self.out = nn.Linear(widths[-1], dim)

    def each(self, x: Tensor) -> Tensor:
        """φ(x_j) (n, dim)."""
        x = convolved(x, *self.convolutions)
        return self.out(self.fc(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        """1/n Σ_j φ(x_j)."""
        return self.each(x).mean(0)


class MeanSets200(MeanSets):
    """`mean-200`: `mean` with one hidden layer of 200 units, as the program has it that FedTTA's
    authors released (784-200-32 on MNIST)."""

    def __init__(self, target: nn.Module, shape: Shape, dim: int) -> None:
        super().__init__(target, shape, dim, (200,))


class SphereDeepSets(MeanSets):
    """`ds-sphere`: DeepSets of bounded sensitivity (Lemma 2): φ on the unit sphere, mean pooling,
    ψ(z) = √d z, which gives the descriptor's entries the scale of pFedHN's embeddings."""

    def __init__(self, target: nn.Module, shape: Shape, dim: int) -> None:
        super().__init__(target, shape, dim, (WIDTH,))
        self.lipschitz = dim**0.5  # L_ψ

    def forward(self, x: Tensor) -> Tensor:
        """ψ(1/n Σ_j φ(x_j)); where φ is infinite the direction counts 0, for no server may learn
        which inputs exceed a number."""
        phi = F.normalize(self.each(x), dim=1)
        return self.lipschitz * phi.nan_to_num(0.0, 0.0, 0.0).mean(0)

    def sensitivity(self, n: int) -> float:
        """Δ = 2 L_ψ B_φ / n with B_φ = 1, Lemma 2; rounding in float32 is not counted."""
        return 2 * self.lipschitz / n


ENCODERS: dict[str, Callable[[nn.Module, Shape, int], Encoder]] = {
    "ds": DeepSets,
    "dss": DeepSymmetricSets,
    "st": SetTransformer,
    "ds-sphere": SphereDeepSets,
    "mean": MeanSets,
    "mean-200": MeanSets200,
}
NAMES = {build: name for name, build in ENCODERS.items()}


class Described(nn.Module):
    """A target network and the encoder of its client's inputs."""

    def __init__(self, target: nn.Module, encoder: Encoder) -> None:
        super().__init__()
        self.target = target
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        """The target network's logits (n, C)."""
        return self.target(x)


def _convolutions(target: nn.Module, shape: Shape) -> nn.ModuleList:
    """New convolutions as large as the target network's, the first one for inputs of `shape`."""
    convolutions = nn.ModuleList()
    channels = shape[0]
    for m in target.modules():
        if not isinstance(m, nn.Conv2d):
            continue
        convolutions.append(
            nn.Conv2d(channels, m.out_channels, m.kernel_size, padding=m.padding)  # type: ignore[arg-type]
        )
        # Each one feeds the next, whatever lies between them in the target network.
        channels = m.out_channels
    return convolutions


def _sizes(convolutions: nn.ModuleList, shape: Shape) -> list[int]:
    """Values per sample after each pooled convolution; the input's if there is none."""
    sizes = []
    x = torch.zeros(1, *shape)
    with torch.no_grad():
        for convolution in convolutions:
            try:
                x = pooled(convolution(x))
            except RuntimeError as error:
                raise ValueError(
                    "the encoder repeats the network's convolutions, with max-pooling by 2 after "
                    f"each; for {convolution} nothing is left of inputs of shape {shape}: choose a "
                    "network with fewer convolutions, or with padding"
                ) from error
            sizes.append(x.numel())
    return sizes or [x.numel()]


def _fully_connected(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers of these widths, ReLU after each."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers)
