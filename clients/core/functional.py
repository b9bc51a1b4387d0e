"""A network called with other parameters than its own.

With a module that a network holds under two names, torch's `functional_call` does not put the
module's own tensors back: it swaps them twice, in the same order."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call as torch_functional_call

CHECKPOINTED = (
    "torch.utils.checkpoint computes gradients with the network's own weights, and the method "
    "calls it with others; turn checkpointing off"
)


def functional_call(
    module: nn.Module, tensors: Mapping[str, Tensor], inputs: tuple[Any, ...]
) -> Any:
    """module(*inputs) with `tensors` by name in place of its own; tied ones need one of their
    names. Afterwards the module has its own tensors.

    Raises RuntimeError where gradients are computed of a pass that torch.utils.checkpoint will
    repeat: it would repeat it with the module's own tensors, without a word."""
    if torch.is_grad_enabled():
        with disable_saved_tensors_hooks(CHECKPOINTED):
            return _call(module, tensors, inputs)
    return _call(module, tensors, inputs)


def _call(module: nn.Module, tensors: Mapping[str, Tensor], inputs: tuple[Any, ...]) -> Any:
    modules = dict(module.named_modules(remove_duplicate=False))
    if len(set(map(id, modules.values()))) == len(modules):
        return torch_functional_call(module, dict(tensors), inputs)
    swapped = _by_place(module, modules, tensors)
    return torch_functional_call(module, swapped, inputs, tie_weights=False)


def _by_place(
    module: nn.Module, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The `tensors` under one name of each place that holds one: a tensor has one name in each
    module that holds it, whatever other names that module has."""
    places: dict[int, list[str]] = {}  # by the tensor's id
    for module_name, holder in module.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, tensor in _held(holder).items():
            places.setdefault(id(tensor), []).append(f"{prefix}{name}")
    by_place: dict[str, Tensor] = {}
    for name, value in tensors.items():
        module_name, _, own_name = name.rpartition(".")
        tensor = _held(modules[module_name])[own_name]
        for place in places[id(tensor)]:
            by_place[place] = value
    return by_place


def _held(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters and buffers that the module itself holds."""
    return {**module._parameters, **module._buffers}
