"""Local SGD: mini-batches and the loop over them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clients.core.optimizers import SGD
from partitions.shares import Samples


def batches(
    n: int,
    batch_size: int,
    *,
    steps: int = 0,
    epochs: int = 0,
    generator: torch.Generator,
    short: bool = False,
) -> Sequence[Tensor]:
    """Row indices of each mini-batch: reshuffled passes over `n` samples.

    `steps` batches of min(batch_size, n) rows, which continue into the next pass; if `short`, the
    last batch of a pass holds what remains instead. With `epochs` > 0 so many passes, whose last
    batch may be shorter. Raises ValueError if there is no sample."""
    if not n:
        raise ValueError("the client has no samples to train on")
    if epochs > 0 or short:
        count = epochs or -(-steps // -(-n // batch_size))
        passes = [torch.randperm(n, generator=generator) for _ in range(count)]
        rows = [rows for order in passes for rows in order.split(batch_size)]
        return rows if epochs > 0 else rows[:steps]
    size = min(batch_size, n)
    passes = [torch.randperm(n, generator=generator) for _ in range(-(-steps * size // n))]
    if len(passes) != 1:
        passes = [torch.cat([torch.empty(0, dtype=torch.int64), *passes])]
    return passes[0][: steps * size].view(steps, size).unbind()


def mini_batches(samples: Samples, rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """x and y of each of the `rows`. Up to one pass is gathered at once; for more than that, all
    samples are converted once and each mini-batch is gathered from them."""
    if len(rows) < 2 or not samples.fixed:
        yield from (samples[row] for row in rows)
        return
    order, sizes = torch.cat(list(rows)), list(map(len, rows))
    if len(order) > len(samples):
        x, y = samples[:]
        for some in order.to(x.device).split(sizes):
            yield x.index_select(0, some), y.index_select(0, some)
    else:
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
    drift: Sequence[Tensor] = (),
    adjust: Callable[[], None] | None = None,
) -> float:
    """One SGD step per mini-batch in `rows`; returns the mean loss.

    `drift`, one tensor for each parameter, is added to every gradient; then `adjust` may change
    gradients. Momentum starts at zero. Raises ValueError if all parameters are frozen."""
    trained = list(parameters)
    optimizer = SGD(trained, lr, momentum, weight_decay)
    if not any(p.requires_grad for group, _ in optimizer.groups for p in group):
        raise ValueError("all parameters that this step trains are frozen; leave some unfrozen")
    total: Tensor | None = None
    for x, y in mini_batches(samples, rows):
        value = loss(x, y)
        optimizer.zero_grad()
        value.backward()
        for parameter, correction in zip(trained, drift, strict=False):
            if parameter.grad is not None:
                parameter.grad += correction
        if adjust is not None:
            adjust()
        optimizer.step()
        total = value.detach() if total is None else total + value.detach()
    return 0.0 if total is None else float(total) / len(rows)


@contextmanager
def train_only(model: nn.Module, chosen: Callable[[str], bool]) -> Iterator[list[nn.Parameter]]:
    """Within the context only the parameters with chosen names require gradients.

    Yields them in the model's order."""
    named = dict(model.named_parameters())
    frozen = [p for name, p in named.items() if not chosen(name) and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield [p for name, p in named.items() if chosen(name)]
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
