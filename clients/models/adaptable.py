"""A prediction network with the network that adapts it (UPFL, FedTTA's Section 3.2)."""

import itertools

from torch import Tensor, nn


class Adaptation(nn.Sequential):
    """g(·; φ): logits (n, C) → one scalar a sample (n, 1); three hidden ReLU layers of `width`."""

    def __init__(self, num_classes: int, width: int = 32) -> None:
        widths = [num_classes, width, width, width]
        hidden: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            hidden += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*hidden, nn.Linear(width, 1))


class Adaptable(nn.Module):
    """The base prediction model f(·; ψ) and the adaptation model g(·; φ) of its logits."""

    def __init__(self, base: nn.Module, adaptation: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.adaptation = adaptation

    def forward(self, x: Tensor) -> Tensor:
        """Un-adapted logits (n, C)."""
        return self.base(x)
