"""FedSR's network: a target network whose representation is a Gaussian (Nguyen et al., 2022)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.models.head import HeadedNetwork, take_head


def widen(model: nn.Module, width: int) -> None:
    """Replace the last linear layer of `model`, which gives `width` features, by one of twice as
    many. Raises ValueError if it has none of that width."""
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not linear or linear[-1][1].out_features != width:
        raise ValueError(f"{type(model).__name__} has no last hidden layer of {width} units")
    name, last = linear[-1]
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Linear(last.in_features, 2 * width))


class Stochastic(HeadedNetwork):
    """z ~ N(m(x), s(x)²) on top of the target network's features, then its head.

    Mean and deviation come from a linear layer on the features ("added") or are the features
    themselves, of a last hidden layer that is twice as wide ("widened": with its ReLU neither a
    mean falls below 0 nor a deviation below softplus(0) = ln 2).

    Sampled in training mode, the mean in evaluation mode. `reference_mean` and `reference_scale`
    (C, d) make r(z|y), a trained Gaussian per class, σ = softplus(reference_scale)."""

    def __init__(self, model: nn.Module, num_classes: int, layer: str = "added") -> None:
        super().__init__()
        self.head = take_head(model)
        self.body = model
        width = self.head.in_features
        self.representation: nn.Module = nn.Identity()
        if layer == "added":
            self.representation = nn.Linear(width, 2 * width)
        else:
            widen(model, width)
        self.reference_mean = nn.Parameter(torch.zeros(num_classes, width))
        self.reference_scale = nn.Parameter(torch.ones(num_classes, width))

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """m(x) and s(x) > 0, each (n, d)."""
        mean, scale = self.representation(self.body(x)).chunk(2, dim=1)
        return mean, F.softplus(scale)

    def reference(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation (n, d) of r(z|y) for the labels y (n,)."""
        return self.reference_mean[y], F.softplus(self.reference_scale)[y]

    def draw(self, mean: Tensor, scale: Tensor) -> Tensor:
        """z (n, d), drawn from N(m, s²)."""
        return mean + scale * torch.randn_like(scale)

    def sample(self, mean: Tensor, scale: Tensor) -> Tensor:
        """z (n, d): drawn in training mode, the mean in evaluation mode."""
        return self.draw(mean, scale) if self.training else mean

    def features(self, x: Tensor) -> Tensor:
        """z (n, d) for the inputs x (n, *shape)."""
        return self.sample(*self.distribution(x))
