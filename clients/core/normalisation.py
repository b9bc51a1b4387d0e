"""Normalisation layers with batch statistics, and the entropy of predictions."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays
from clients.core.layer_inputs import before_calls
from clients.core.layout import set_training

INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm
NORMS = nn.modules.batchnorm._NormBase  # batch and instance normalisation
NORMALISATION = (
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    INSTANCE_NORM,
)
MEAN = ".running_mean"  # the end of the name of a layer's array
OF_STATISTICS = (".running_var", ".num_batches_tracked")  # a layer with running statistics has both


def class_logits(z: Tensor) -> Tensor:
    """Logits (n, C) of several classes: the outputs z, or 0 and z for one output, whose σ(z) is
    then the second class's probability."""
    if z.shape[1] > 1:
        return z
    return torch.cat([torch.zeros_like(z), z], 1)


def entropies(log_p: Tensor) -> Tensor:
    """Shannon entropy H (n,) in nats of log-probabilities (n, C)."""
    return -(log_p.exp() * log_p).sum(1)


def entropy(logits: Tensor) -> Tensor:
    """Mean Shannon entropy H(σ(z)) in nats of logits (n, C), or of one output for two classes."""
    return entropies(class_logits(logits).log_softmax(1)).mean()


def normalisation(model: nn.Module) -> list[nn.Module]:
    """The normalisation layers of a network."""
    return [module for module in model.modules() if isinstance(module, NORMALISATION)]


def sizes_with_statistics(arrays: Arrays) -> dict[str, int]:
    """The channels of each layer with running statistics, by its name, in the order of the arrays.

    A server knows a network by its arrays alone, so clients count the layers by them, too: a layer
    with two names counts twice, and instance normalisation may have such statistics as well."""
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        layer = name.removesuffix(MEAN)
        others = [layer + ending for ending in OF_STATISTICS]
        if layer != name and array.ndim == 1 and all(other in arrays for other in others):
            sizes[layer] = len(array)
    return sizes


def batch_statistics(model: nn.Module, on: bool = True) -> nn.Module:
    """Put `model` into evaluation mode; if `on`, its normalisation layers use batch statistics."""
    set_training(model, False)
    for module in normalisation(model):
        module.train(on)
    return model


class NormCalls:
    """Counts the forward passes of a network, and the calls of its layers with running
    statistics."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: list[nn.Module] = []
        for module in normalisation(model):
            if isinstance(module, NORMS) and module.running_mean is not None:
                self.layers.append(module)
        self.calls: Counter[nn.Module] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within the context, calls are counted."""
        hooks = []
        for module in {self.model, *self.layers}:
            hooks.append(before_calls(module, partial(self._count, module)))
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def _count(self, module: nn.Module, _: Tensor) -> None:
        self.calls[module] += 1

    def kept_by_statistics(self, num_parts: int) -> bool:
        """Whether `with_statistics` keeps the predictions that the network has for inputs in
        `num_parts` parts, each with batch statistics.

        It does not where the statistics are means: over several parts, over the calls of a layer
        in a pass, and over the inputs in instance normalisation. It need not where layers hold the
        same statistics, and for a layer with a forward pass of its own."""
        if self.layers and num_parts > 1:
            return False
        passes = self.calls[self.model]
        holders: set[int] = set()
        for layer in self.layers:
            if self.calls[layer] > passes or isinstance(layer, INSTANCE_NORM):
                return False
            if not type(layer).forward.__module__.startswith("torch."):
                return False
            if id(layer.running_mean) in holders:
                return False
            holders.add(id(layer.running_mean))
        return True


def with_statistics(model: nn.Module, *parts: Tensor) -> nn.Module:
    """Put `model` into evaluation mode with the inputs' statistics as its running statistics.

    The statistics are means over the parts, and over the calls of a layer. One input has no
    variance: it changes nothing."""
    if len(parts[0]) <= 1:
        return model.eval()
    values_per_channel: dict[Any, int] = {}  # by layer
    momenta: dict[Any, float | None] = {}  # by layer
    hooks = []
    for module in normalisation(batch_statistics(model)):
        if isinstance(module, NORMS):
            momenta[module] = module.momentum
            module.reset_running_stats()
            module.momentum = None  # torch then keeps the mean over the forward passes
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            hooks.append(before_calls(module, partial(_note_count, values_per_channel, module)))
    with torch.no_grad():
        for part in parts:
            model(part)
    for handle in hooks:
        handle.remove()
    # Torch divides a running variance by n − 1. A layer that normalises a batch divides by n.
    for norm, n in values_per_channel.items():
        if norm.running_var is not None:
            norm.running_var *= (n - 1) / n
    for norm, momentum in momenta.items():
        norm.momentum = momentum
    return model.eval()


def _note_count(values_per_channel: dict[Any, int], norm: nn.Module, x: Tensor) -> None:
    """Note how many values of the layer's input x enter the statistics of a channel."""
    values_per_channel[norm] = x.numel() // x.shape[1]


def check_norms(method: str, model: nn.Module, norms: Collection[str]) -> None:
    """Raise ValueError if `norms`, those of the model's batch normalisation layers that the method
    can use, are empty."""
    if norms:
        return
    if untracked_norms(model):
        raise ValueError(f"{method} needs {missing_statistics(type(model).__name__, model)}")
    raise ValueError(
        f"{method} needs batch normalisation, {type(model).__name__} has none; models that have "
        "it: convnet-bn, torchvision.models:resnet18"
    )


def untracked_norms(model: nn.Module) -> list[str]:
    """The names of the batch normalisation layers without running statistics."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            names.append(name)
    return names


def missing_statistics(name: str, model: nn.Module) -> str:
    """What a network of this name lacks that has no batch normalisation with running statistics,
    in words that follow "needs"."""
    untracked = untracked_norms(model)
    if untracked:
        return (
            f"batch normalisation with running statistics, and that of {name} keeps none: "
            f"{', '.join(untracked):.200}; leave out track_running_stats=False"
        )
    others = set()  # such as FrozenBatchNorm2d
    for module in model.modules():
        if isinstance(getattr(module, "running_mean", None), Tensor):
            others.add(type(module).__name__)
    if others:
        kinds = ", ".join(sorted(others))
        return f"batch normalisation of torch.nn; {name} has running statistics in {kinds} alone"
    return f"batch normalisation, which {name} lacks"
