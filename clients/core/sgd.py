"""Local SGD: mini-batches and the loop over them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from clients.core.mixed_precision import MixedPrecision
from clients.core.optimizers import SGD, Optimizer, TorchOptimizer
from partitions.shares import Samples

# Starts a concatenation, which needs a tensor even for 0 steps.
NO_ROWS = torch.empty(0, dtype=torch.int64)


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
