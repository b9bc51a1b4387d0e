"""What enters a layer of a network."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def before_calls(layer: nn.Module, see: Callable[[Tensor], object]) -> RemovableHandle:
    """`see` gets the layer's input before each of its forward passes, also where the network gives
    it by keyword, until the handle is removed."""

    def call(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        see([*args, *kwargs.values()][0])

    return layer.register_forward_pre_hook(call, with_kwargs=True)
