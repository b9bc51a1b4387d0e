"""SGD and Adam by torch's functional forms.

The first instance of a class of `torch.optim` imports torch's compiler: 3.6 s and 160 MB, for each
actor of a simulation and for each message that a real node answers. Nothing is compiled here."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from clients.core.arrays import to_tensors

MOMENTS = ("first", "second", "steps")  # what Adam keeps


class Optimizer:
    """The base of SGD and Adam: groups of parameters, each with a learning rate.

    `parameters` are tensors, or groups {"params": …, "lr": …} as in torch.optim; for SGD also with
    "momentum"."""

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
    ) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        self.kept: dict[Tensor, dict[str, Tensor]] = {}  # by parameter, from its first step on
        self.groups: list[tuple[list[Tensor], float]] = []
        plain: list[Tensor] = []
        for item in parameters:
            if isinstance(item, dict):
                self.add(**item)
            else:
                plain.append(item)
        self.add(plain)

    def add(self, params: Iterable[Tensor], lr: float | None = None) -> None:
        """Add a group, by default at the common learning rate."""
        self.groups.append((list(params), self.lr if lr is None else lr))

    def state(self) -> list[dict[str, np.ndarray]]:
        """The state of each parameter, in the order of the groups; memory is shared."""
        states = [self.kept.get(p, {}) for parameters, _ in self.groups for p in parameters]
        return [{name: t.cpu().numpy() for name, t in state.items()} for state in states]

    def load_state(self, state: Sequence[dict[str, np.ndarray]]) -> None:
        """Set what `state` gave, for the same parameters in the same order."""
        parameters = [p for parameters, _ in self.groups for p in parameters]
        for parameter, arrays in zip(parameters, state, strict=True):
            kept = to_tensors(arrays, parameter.device)
            self.kept[parameter] = {name: laid_out(t, parameter) for name, t in kept.items()}

    def zero_grad(self) -> None:
        """Delete the gradients."""
        for parameters, _ in self.groups:
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        """Descend along the gradients, each group at `factor` times its learning rate; a
        parameter without a gradient stays unchanged."""
        for parameters, lr in self.groups:
            moved = [p for p in parameters if p.grad is not None]
            gradients = [laid_out(g, p) for p in parameters if (g := p.grad) is not None]
            if moved:
                self.update(moved, gradients, factor * lr)

    def update(self, parameters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        """Change `parameters` in place."""
        raise NotImplementedError


class SGD(Optimizer):
    """b ← momentum·b + g + weight_decay·p, p ← p − lr·b (torch.optim.SGD)."""

    def __init__(
        self, parameters: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        self.momentum = momentum
        self._momenta: dict[Tensor, float] = {}  # of groups with their own momentum
        super().__init__(parameters, lr, weight_decay)

    def add(
        self, params: Iterable[Tensor], lr: float | None = None, momentum: float | None = None
    ) -> None:
        """Add a group, by default at the common learning rate and momentum."""
        params = list(params)
        super().add(params, lr)
        if momentum is not None:
            self._momenta |= dict.fromkeys(params, momentum)

    def update(self, parameters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        """One step of one group."""
        momentum = self._momenta.get(parameters[0], self.momentum)
        if not momentum and not self.weight_decay:
            torch._foreach_add_(parameters, gradients, alpha=-lr)  # in half of the time
            return
        if momentum:
            for p in parameters:
                if not self.kept.get(p):
                    self.kept[p] = {"momentum": torch.zeros_like(p)}
        sgd(
            parameters,
            gradients,
            [self.kept[p]["momentum"] if momentum else None for p in parameters],  # b
            weight_decay=self.weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            fused=True,  # in one pass over the memory: a half to a third of the time
        )


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with torch.optim.Adam's defaults: betas 0.9 and 0.999, ε 1e-8."""

    def update(self, parameters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        """One step of one group."""
        for p in parameters:
            if not self.kept.get(p):
                start = (torch.zeros_like(p), torch.zeros_like(p), torch.zeros((), device=p.device))
                self.kept[p] = dict(zip(MOMENTS, start, strict=True))
        first, second, steps = ([self.kept[p][name] for p in parameters] for name in MOMENTS)
        adam(
            parameters,
            gradients,
            first,
            second,
            [],
            steps,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=lr,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
            fused=True,  # a step in one pass over the memory: an eighth of the time
        )


def laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    """`tensor`, dense, with the strides of `parameter` if the shapes agree: torch's fused steps
    read both in the order of their memory."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.shape != parameter.shape or tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter).copy_(tensor)
