"""A target network and its head apart, for networks that put something between them."""

import torch
from torch import Tensor, nn


def head_of(model: nn.Module) -> nn.Linear:
    """The last linear layer of ``head(features(x))``. ValueError if it has no linear `head`."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear layer named 'head'")
    return head


def take_head(model: nn.Module) -> nn.Linear:
    """Take the last linear layer off ``head(features(x))``: from now on the model gives features.

    Raises ValueError if it has no linear `head`."""
    head = head_of(model)
    model.head = nn.Identity()
    return head


class Headed(nn.Module):
    """A foreign network as ``head(features(x))``: `body` is all of it but its last linear layer.

    Images of one channel are repeated to the `channels` that it takes."""

    def __init__(self, body: nn.Module, head: nn.Linear, channels: int) -> None:
        super().__init__()
        self.body, self.head, self.channels = body, head, channels

    def features(self, x: Tensor) -> Tensor:
        """Activations before the head."""
        return self.body(x.expand(-1, self.channels, -1, -1) if self.channels else x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C)."""
        return self.head(self.features(x))


def headed(network: nn.Module, name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """`network` if it is ``head(features(x))``, else its last linear layer made the head.

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
        network = Headed(network, head, convolutions[0].in_channels if grey else 0)
    training = network.training
    try:
        with torch.no_grad():
            logits = network.eval()(torch.zeros(2, *shape))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name!r} cannot take inputs of shape {shape}: {error}") from error
    if logits.shape != (2, num_classes):
        raise ValueError(f"{name!r} gives {tuple(logits.shape)} for 2 inputs, not logits (2, C)")
    return network.train(training)
