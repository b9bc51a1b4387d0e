"""Networks of the form ``head(features(x))``, and how others get that form."""

import torch
from torch import Tensor, nn


class HeadedNetwork(nn.Module):
    """A network whose last linear layer is named `head`; a subclass says what its features are."""

    head: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, d) before the head; x (n, *shape)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C)."""
        return self.head(self.features(x))


def head_of(model: nn.Module) -> nn.Linear:
    """The last linear layer of ``head(features(x))``. ValueError if it has no linear `head`."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear layer named 'head'")
    return head


def take_head(model: nn.Module) -> nn.Linear:
    """Remove the head of ``head(features(x))``: the model then gives features. ValueError as
    `head_of`."""
    head = head_of(model)
    model.head = nn.Identity()
    return head


class ForeignNetwork(HeadedNetwork):
    """A network from outside the package: `body` is all of it except the last linear layer.

    Images of one channel are repeated to the `channels` that it takes."""

    def __init__(self, body: nn.Module, head: nn.Linear, channels: int) -> None:
        super().__init__()
        self.body, self.head, self.channels = body, head, channels

    def features(self, x: Tensor) -> Tensor:
        """What `body` gives."""
        return self.body(x.expand(-1, self.channels, -1, -1) if self.channels else x)


def blank_inputs(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Two inputs (2, *shape) of zeros, on the device of the network's parameters."""
    here = next(network.parameters(), torch.empty(0)).device
    return torch.zeros(2, *shape, device=here)


def headed(network: nn.Module, name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """`network` itself if it has a linear `head`; else its last linear layer becomes the head.

    Raises ValueError if it has none of `num_classes` outputs, or cannot take inputs of `shape`."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"{name!r} gives {type(network).__name__}, not a torch.nn.Module")
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    if not isinstance(getattr(network, "head", None), nn.Linear):
        linear = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
        if not linear or linear[-1][1].out_features != num_classes:
            raise ValueError(f"{name!r} does not end in a linear layer of {num_classes} outputs")
        place, head = linear[-1]
        network.set_submodule(place, nn.Identity())
        grey = bool(convolutions) and shape[:1] == (1,)
        network = ForeignNetwork(network, head, convolutions[0].in_channels if grey else 0)
    training = network.training
    try:
        with torch.no_grad():
            logits = network.eval()(blank_inputs(network, shape))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name!r} cannot take inputs of shape {shape}: {error}") from error
    if logits.shape != (2, num_classes):
        raise ValueError(f"{name!r} gives {tuple(logits.shape)} for 2 inputs, not logits (2, C)")
    return network.train(training)
