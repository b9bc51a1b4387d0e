"""Layers that normalise, whose statistics are the batch's, and the entropy of predictions."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NORMALISATION = (
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.modules.instancenorm._InstanceNorm,
)


def entropies(log_p: Tensor) -> Tensor:
    """Shannon entropy H (n,) in nats of log-probabilities (n, C)."""
    return -(log_p.exp() * log_p).sum(1)


def entropy(logits: Tensor) -> Tensor:
    """Mean Shannon entropy H(σ(z)) in nats of logits (n, C)."""
    return entropies(logits.log_softmax(1)).mean()


def normalisation(model: nn.Module) -> list[nn.Module]:
    """The normalisation layers of a network."""
    return [module for module in model.modules() if isinstance(module, NORMALISATION)]


def batch_statistics(model: nn.Module, on: bool = True) -> nn.Module:
    """`model` in evaluation mode; if `on`, its normalisation layers use batch statistics."""
    model.eval()
    for module in normalisation(model):
        module.train(on)
    return model


def with_statistics(model: nn.Module, *parts: Tensor) -> nn.Module:
    """`model` in evaluation mode, with the statistics of the inputs as running statistics: the
    mean over the parts."""
    if len(parts[0]) > 1:  # one sample has no variance
        counts: dict[Any, int] = {}  # by layer
        hooks = []
        for module in normalisation(batch_statistics(model)):
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.reset_running_stats()
                module.momentum = None  # the mean over batches
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                hooks.append(module.register_forward_hook(partial(_count, counts)))
        with torch.no_grad():
            for part in parts:
                model(part)
        for hook in hooks:
            hook.remove()
        for norm, n in counts.items():  # a batch's variance is over n, the running one over n − 1
            if norm.running_var is not None:
                norm.running_var *= (n - 1) / n
    return model.eval()


def _count(counts: dict[Any, int], norm: nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
    """Record how many values enter a channel's statistics."""
    counts[norm] = inputs[0].numel() // inputs[0].shape[1]


def check_norms(method: str, model: nn.Module, norms: Collection[str]) -> None:
    """Raise ValueError if the model has no `norms`, its batch normalisation layers."""
    if not norms:
        raise ValueError(
            f"{method} needs batch normalisation, {type(model).__name__} has none; models that "
            "have it: convnet-bn, torchvision.models:resnet18"
        )
