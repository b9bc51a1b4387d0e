"""FedADG's four networks around a target network (Zhang et al., 2021, Section IV)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.models.head import HeadedNetwork, take_head


class Generator(nn.Module):
    """Distribution generator: noise (n, m) and one-hot labels (n, C) → features (n, d) ≥ 0."""

    def __init__(self, noise_dim: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(noise_dim + num_classes, width)
        self.output = nn.Linear(width, width)

    def forward(self, noise: Tensor, onehot: Tensor) -> Tensor:
        """Reference features (n, d) of the labels' classes."""
        hidden = F.leaky_relu(self.hidden(torch.cat([noise, onehot], 1)))
        return F.relu(self.output(hidden))


class Discriminator(nn.Module):
    """Features (n, d) and one-hot labels (n, C) → probability (n,) that they are reference."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width + num_classes, width)
        self.output = nn.Linear(width, 1)

    def forward(self, features: Tensor, onehot: Tensor) -> Tensor:
        """D(h | y) in (0, 1)."""
        hidden = F.leaky_relu(self.hidden(torch.cat([features, onehot], 1)))
        return self.output(hidden).sigmoid().squeeze(1)


class Aligned(HeadedNetwork):
    """The target network with a feature layer of `width`, a generator and a discriminator."""

    def __init__(self, model: nn.Module, num_classes: int, width: int, noise_dim: int) -> None:
        super().__init__()
        self.feature = nn.Linear(take_head(model).in_features, width)
        self.head = nn.Linear(width, num_classes)
        self.body = model
        self.generator = Generator(noise_dim, num_classes, width)
        self.discriminator = Discriminator(num_classes, width)
        self.noise_dim, self.num_classes = noise_dim, num_classes

    def features(self, x: Tensor) -> Tensor:
        """h = F(x), (n, d) ≥ 0."""
        return F.relu(self.feature(self.body(x)))

    def predictor(self) -> list[nn.Parameter]:
        """The parameters of feature extractor and classifier."""
        return [p for part in (self.body, self.feature, self.head) for p in part.parameters()]
