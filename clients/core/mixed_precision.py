"""Mixed precision of local training: forward passes in 16 bits, parameters and steps in 32."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_autocast(name: str) -> None:
    """Raise ValueError unless it is "", which is none, or a name of `DTYPES`."""
    if not isinstance(name, str) or (name and name not in DTYPES):
        raise ValueError(
            f"autocast is {name!r:.200}; it must be one of {', '.join(map(repr, DTYPES))}, which "
            "forward passes of local training then have"
        )


class MixedPrecision:
    """The forward and backward passes of one round's steps, in the type called `name`.

    Losses of float16 are scaled, so that small gradients are not zero; a step whose scaled
    gradients are not finite is left out (torch.amp.GradScaler). The scale begins anew in each
    round. Raises ValueError for a type that the GPU lacks."""

    def __init__(self, name: str, device: str) -> None:
        self._type = DTYPES[name]
        self._device = device
        if device == "cuda" and name == "bfloat16" and not torch.cuda.is_bf16_supported():
            raise ValueError(
                "autocast is 'bfloat16', which this GPU lacks; give autocast='float16'"
            )
        self._scaler: Any = None
        if name == "float16":
            self._scaler = torch.amp.GradScaler(device)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return torch.autocast(self._device, dtype=self._type)

    def passes(self, optimizer: Any) -> tuple[Callable[[Tensor], None], Callable[[], None]]:
        """The backward pass of a loss, after which gradients have their size, and the step."""
        if self._scaler is None:
            return Tensor.backward, optimizer.step

        def backward(value: Tensor) -> None:
            self._scaler.scale(value).backward()
            self._scaler.unscale_(optimizer)

        def step() -> None:
            self._scaler.step(optimizer)
            self._scaler.update()

        return backward, step
