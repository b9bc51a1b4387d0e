"""FedSR's network: a target network whose representation is a Gaussian (Nguyen et al., 2022)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.models.head import take_head


class Stochastic(nn.Module):
    """z ~ N(m(x), s(x)²) on top of the target network's features, then its head.

    Sampled in training mode, the mean in evaluation mode. `reference_mean` and `reference_scale`
    (C, d) make r(z|y), a learnt Gaussian per class, σ = softplus(reference_scale)."""

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.head = take_head(model)
        self.body = model
        width = self.head.in_features
        self.representation = nn.Linear(width, 2 * width)
        self.reference_mean = nn.Parameter(torch.zeros(num_classes, width))
        self.reference_scale = nn.Parameter(torch.ones(num_classes, width))

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """m(x) and s(x) > 0, each (n, d)."""
        mean, scale = self.representation(self.body(x)).chunk(2, dim=1)
        return mean, F.softplus(scale)

    def reference(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation (n, d) of r(z|y) for the labels y (n,)."""
        return self.reference_mean[y], F.softplus(self.reference_scale)[y]

    def sample(self, mean: Tensor, scale: Tensor) -> Tensor:
        """z (n, d): drawn in training mode, the mean in evaluation mode."""
        return mean + scale * torch.randn_like(scale) if self.training else mean

    def features(self, x: Tensor) -> Tensor:
        """z (n, d) for the inputs x (n, *shape)."""
        return self.sample(*self.distribution(x))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C)."""
        return self.head(self.features(x))
