"""SGD and Adam by torch's functional forms.

The first instance of a class of `torch.optim` imports torch's compiler. This takes 3.6 s and
160 MB, in each actor of a simulation and for each message that a real node answers. Nothing is
compiled here, so these classes do without it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from clients.core.arrays import to_tensors

# Adam's state of a parameter: both moments of the gradient and the number of steps.
MOMENTS = ("first", "second", "steps")


class Optimizer:
    """The base of SGD and Adam: groups of parameters, each with a learning rate.

    `parameters` are tensors, or groups {"params": …, "lr": …} as in torch.optim. A group of SGD
    may also have a "momentum"."""

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
    ) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        # Momentum buffers or Adam's moments by parameter, from the parameter's first step on.
        self.kept: dict[Tensor, dict[str, Tensor]] = {}
        self.groups: list[tuple[list[Tensor], float]] = []  # parameters and learning rate
        ungrouped: list[Tensor] = []
        for item in parameters:
            if isinstance(item, dict):
                self.add(**item)
            else:
                ungrouped.append(item)
        self.add(ungrouped)

    def add(self, params: Iterable[Tensor], lr: float | None = None) -> None:
        """Add a group, by default at the common learning rate."""
        if lr is None:
            lr = self.lr
        self.groups.append((list(params), lr))

    def parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        parameters: list[Tensor] = []
        for group_parameters, _ in self.groups:
            parameters += group_parameters
        return parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters as optimizers of torch have them, for torch's GradScaler."""
        return [{"params": self.parameters()}]

    def state(self) -> list[dict[str, np.ndarray]]:
        """The state of each parameter, in the order of the groups; memory is shared."""
        state = []
        for parameter in self.parameters():
            tensors = self.kept.get(parameter, {})
            state.append({name: t.cpu().numpy() for name, t in tensors.items()})
        return state

    def load_state(self, state: Sequence[dict[str, np.ndarray]]) -> None:
        """Restore the result of `state`, for the same parameters in the same order."""
        for parameter, arrays in zip(self.parameters(), state, strict=True):
            tensors = to_tensors(arrays, parameter.device)
            self.kept[parameter] = {name: laid_out(t, parameter) for name, t in tensors.items()}

    def zero_grad(self) -> None:
        """Delete the gradients."""
        for parameters, _ in self.groups:
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        """Descend along the gradients, each group at `factor` times its learning rate.

        A parameter without a gradient stays unchanged."""
        for parameters, lr in self.groups:
            moved: list[Tensor] = []
            gradients: list[Tensor] = []
            for parameter in parameters:
                if parameter.grad is not None:
                    moved.append(parameter)
                    gradients.append(laid_out(parameter.grad, parameter))
            if moved:
                self.update(moved, gradients, factor * lr)

    def update(self, parameters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        """Change `parameters` in place."""
        raise NotImplementedError


class SGD(Optimizer):
    """SGD as torch.optim.SGD: b ← momentum·b + g + weight_decay·p, p ← p − lr·b."""

    def __init__(
        self, parameters: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        self.momentum = momentum
        # By parameter, for groups whose momentum is not the common one.
        self._momenta: dict[Tensor, float] = {}
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
            # Takes half of the time of the general step below.
            torch._foreach_add_(parameters, gradients, alpha=-lr)
            return
        buffers: list[Tensor | None] = [None] * len(parameters)  # b
        if momentum:
            for i, parameter in enumerate(parameters):
                if not self.kept.get(parameter):
                    self.kept[parameter] = {"momentum": torch.zeros_like(parameter)}
                buffers[i] = self.kept[parameter]["momentum"]
        sgd(
            parameters,
            gradients,
            buffers,
            weight_decay=self.weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            fused=True,  # one pass over the memory, in a half to a third of the time
        )


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with torch.optim.Adam's defaults: betas 0.9 and 0.999, ε 1e-8."""

    decoupled = False  # the weight decay is added to the gradient

    def update(self, parameters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        """One step of one group."""
        first_moments: list[Tensor] = []
        second_moments: list[Tensor] = []
        steps: list[Tensor] = []
        for parameter in parameters:
            if not self.kept.get(parameter):
                first = torch.zeros_like(parameter)
                second = torch.zeros_like(parameter)
                step = torch.zeros((), device=parameter.device)
                self.kept[parameter] = dict(zip(MOMENTS, (first, second, step), strict=True))
            first, second, step = (self.kept[parameter][name] for name in MOMENTS)
            first_moments.append(first)
            second_moments.append(second)
            steps.append(step)
        adam(
            parameters,
            gradients,
            first_moments,
            second_moments,
            [],  # second moments of AMSGrad
            steps,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=lr,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
            fused=True,  # one pass over the memory, in an eighth of the time
            decoupled_weight_decay=self.decoupled,
        )


class AdamW(Adam):
    """Adam whose weight decay is p ← p − lr·weight_decay·p beside the step (Loshchilov and Hutter,
    ICLR 2019)."""

    decoupled = True


class TorchOptimizer:
    """A user's optimizer of `torch.optim`, and a scheduler of its learning rates for each step.

    Each step is at `factor` times the learning rates."""

    def __init__(self, optimizer: Any, scheduler: Any = None, factor: float = 1.0) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.factor = factor

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As those of `optimizer`."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        parameters: list[Tensor] = []
        for group in self.param_groups:
            parameters += group["params"]
        return parameters

    def zero_grad(self) -> None:
        """Delete the gradients."""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """One step, then one of the scheduler."""
        groups = self.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = self.factor * group["lr"]  # a new object: a rate may be a tensor
        self.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        if self.scheduler is not None:
            self.scheduler.step()


def laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    """`tensor`, dense and with the strides of `parameter` if the shapes agree.

    Torch's fused steps read both in the order of their memory."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.shape != parameter.shape or tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter).copy_(tensor)
