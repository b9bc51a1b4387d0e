"""Copies of networks, which may keep what their last forward pass computed."""

from copy import deepcopy
from typing import TypeVar

from torch import Tensor, nn

N = TypeVar("N", bound=nn.Module)


def copy_of(network: N) -> N:
    """A copy that shares no memory with the network.

    Torch copies no tensor that has a gradient to compute. A network has some where its forward pass
    keeps features in an attribute, or a weight, as torch.nn.utils.weight_norm does: the copy has
    their values alone."""
    known: dict[int, Tensor] = {}  # copies by the id of the original, as `deepcopy` takes them
    visited: set[int] = set()
    for module in network.modules():
        _note_computed(vars(module), known, visited)
    return deepcopy(network, known)


def _note_computed(value: object, known: dict[int, Tensor], visited: set[int]) -> None:
    """Note copies of the computed tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        if not value.is_leaf:
            known[id(value)] = value.detach().clone()
        return
    if not isinstance(value, list | tuple | dict) or id(value) in visited:
        return
    visited.add(id(value))
    for entry in value.values() if isinstance(value, dict) else value:
        _note_computed(entry, known, visited)
