"""Local SGD: mini-batches, the loop over them, and the optimizers, which the server uses as well.

SGD and Adam are torch's functional forms. The first instance of a class of `torch.optim` imports
torch's compiler. This takes 3.6 s and 160 MB, in each actor of a simulation and for each message
that a real node answers. Nothing is compiled here, so these classes do without it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam as adam_step
from torch.optim.sgd import sgd as sgd_step

from clients.core.arrays import to_tensors
from clients.core.mixed_precision import MixedPrecision
from partitions.shares import Samples

# Starts a concatenation, which needs a tensor even for 0 steps.
NO_ROWS = torch.empty(0, dtype=torch.int64)
# Adam's state of a parameter: both moments of the gradient and the number of steps.
MOMENTS = ("first", "second", "steps")


def batches(
    n: int,
    batch_size: int,
    *,
    steps: int = 0,
    epochs: int = 0,
    generator: torch.Generator,
    short: bool = False,
    independent: bool = False,
) -> Sequence[Tensor]:
    """Row indices of each mini-batch; the `n` samples are shuffled anew for each epoch.

    `epochs` > 0 gives the mini-batches of this many epochs; the last one of an epoch may be
    smaller. Otherwise there are `steps` mini-batches: by default each has min(batch_size, n) rows
    and may continue into the next epoch; if `short`, the last one of an epoch may be smaller.
    Raises ValueError if there is no sample."""
    if not n:
        raise ValueError("the client has no samples to train on")
    if independent and epochs == 0:
        return [torch.randperm(n, generator=generator)[:batch_size] for _ in range(steps)]
    if epochs > 0 or short:
        batches_per_epoch = math.ceil(n / batch_size)
        num_epochs = epochs or math.ceil(steps / batches_per_epoch)
        rows: list[Tensor] = []
        for _ in range(num_epochs):
            rows += torch.randperm(n, generator=generator).split(batch_size)
        return rows if epochs > 0 else rows[:steps]
    size = min(batch_size, n)
    num_epochs = math.ceil(steps * size / n)
    orders = [torch.randperm(n, generator=generator) for _ in range(num_epochs)]
    order = orders[0] if len(orders) == 1 else torch.cat([NO_ROWS, *orders])
    return order[: steps * size].view(steps, size).unbind()


def mini_batches(samples: Samples, rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs x and labels y of each mini-batch in `rows`."""
    if len(rows) < 2 or not samples.fixed:
        for row in rows:
            yield samples[row]
        return
    order = torch.cat(list(rows))
    sizes = list(map(len, rows))
    if len(order) > len(samples):
        # More than one epoch: convert all samples once, then gather each mini-batch from them.
        x, y = samples[:]
        for row in order.to(x.device).split(sizes):
            yield x.index_select(0, row), y.index_select(0, row)
    else:
        # Up to one epoch: gather the samples of all mini-batches at once, which is faster.
        x, y = samples[order]
        yield from zip(x.split(sizes), y.split(sizes), strict=True)


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
        sgd_step(
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
        adam_step(
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


def sgd(
    parameters: Iterable[nn.Parameter],
    samples: Samples,
    rows: Sequence[Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
    drift: Sequence[Tensor] = (),
    adjust: Callable[[], None] | None = None,
    make_optimizer: Callable[[Sequence[Any]], Optimizer | TorchOptimizer] | None = None,
    precision: MixedPrecision | None = None,
) -> float:
    """One step per mini-batch in `rows`, of SGD or of what `make_optimizer` makes of the
    parameters; returns the mean loss.

    The gradient of the loss is clipped to `clip_norm`. `drift` holds one tensor for each parameter,
    which is then added to every gradient. Then `adjust` is called, which may change gradients. The
    momentum buffers start at zero. `precision` is that of the forward passes. Raises ValueError if
    all parameters are frozen."""
    trained = list(parameters)
    optimizer: Optimizer | TorchOptimizer
    if make_optimizer is None:
        optimizer = SGD(trained, lr, momentum, weight_decay)
    else:
        optimizer = make_optimizer(trained)
    if not any(p.requires_grad for p in optimizer.parameters()):
        raise ValueError("all parameters that this step trains are frozen; leave some unfrozen")
    backward: Callable[[Tensor], None] = Tensor.backward
    step = optimizer.step
    forward: AbstractContextManager[Any] = nullcontext()
    if precision is not None:
        forward = precision.autocast()
        backward, step = precision.passes(optimizer)
    total: Tensor | None = None
    for x, y in mini_batches(samples, rows):
        with forward:
            value = loss(x, y)
        optimizer.zero_grad()
        backward(value)
        clip_gradients(optimizer.parameters(), clip_norm)
        if drift:
            for parameter, correction in zip(trained, drift, strict=True):
                if parameter.grad is not None:
                    parameter.grad += correction
        if adjust is not None:
            adjust()
        step()
        # Summed on the device: a float of each loss would wait for the GPU.
        total = value.detach() if total is None else total + value.detach()
    if total is None:
        return 0.0
    return float(total) / len(rows)


def clip_gradients(parameters: Iterable[Tensor], clip_norm: float) -> None:
    """Clip the common norm of the parameters' gradients to `clip_norm`; 0: leave them."""
    if clip_norm > 0:
        nn.utils.clip_grad_norm_(parameters, clip_norm)


@contextmanager
def train_only(model: nn.Module, chosen: Callable[[str], bool]) -> Iterator[list[nn.Parameter]]:
    """Within the context, only the parameters whose names are `chosen` require gradients.

    Yields these parameters in the model's order."""
    trained: list[nn.Parameter] = []
    frozen: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if chosen(name):
            trained.append(parameter)
        elif parameter.requires_grad:
            frozen.append(parameter)
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield trained
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
