"""FedAvg as one writes it by hand: tensors in memory, a loop, a mean. Others are measured by it."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shares = Sequence[tuple[Tensor, Tensor]]  # x (n, *shape), y (n,) of clients


def rounds(
    model: nn.Module,
    chosen: Callable[[], Shares],
    rows: Callable[[int], Sequence[Tensor]],
    lr: float,
    count: int,
) -> Iterator[int]:
    """Train `count` rounds, each of whoever is `chosen`, on the mini-batches that `rows` gives for
    n samples; yields after every round."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    server = [p.detach().clone() for p in model.parameters()]
    for number in range(count):
        total = [torch.zeros_like(p) for p in server]
        clients = chosen()
        for x, y in clients:
            with torch.no_grad():
                for p, w in zip(model.parameters(), server, strict=True):
                    p.copy_(w)
            for batch in rows(len(y)):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                for one, p in zip(total, model.parameters(), strict=True):
                    one.add_(p, alpha=1 / len(clients))
        server = total
        yield number
