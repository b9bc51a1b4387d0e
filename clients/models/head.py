"""A target network and its head apart, for networks that put something between them."""

from torch import nn


def take_head(model: nn.Module) -> nn.Linear:
    """Take the last linear layer off ``head(features(x))``: from now on the model gives features.

    Raises ValueError if it has no linear `head`."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear layer named 'head'")
    model.head = nn.Identity()
    return head
