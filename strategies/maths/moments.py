"""Running mean and deviation of clients' descriptors, by which a server centres and scales them.

Descriptors of similar clients differ by thousandths of their norm. A hypernetwork, initialised for
embeddings from N(0, I), then generates nearly the same model for all. The statistics are those of
training clients; applied to a private descriptor they are post-processing."""

import torch
from torch import Tensor

FLOOR = 1e-3  # least deviation of an entry, in deviations of all entries


class Moments:
    """Mean μ and variance (d,) over training clients, by entry; float64.

    A round's statistics have the weight `rate` in (0, 1], former ones the rest. Until the first
    ones, nothing is centred or scaled."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.mean, self.variance = torch.zeros(0), torch.zeros(0)

    def update(self, values: Tensor) -> None:
        """Add the descriptors (m, d) of a round. The variance is about the new mean:
        σ² ← (1 − a)(σ² + a(x̄ − μ)²) + a s², μ ← μ + a(x̄ − μ)."""
        values = values.detach().double()
        mean, variance = values.mean(0), values.var(0, correction=0)
        if not len(self.mean):
            self.mean, self.variance = mean, variance
            return
        a, moved = self.rate, mean - self.mean
        self.variance = (1 - a) * (self.variance + a * moved.square()) + a * variance
        self.mean = self.mean + a * moved

    def scaled(self, e: Tensor) -> Tensor:
        """(e − μ)/σ; μ and σ are constants to the gradient."""
        if not len(self.mean):
            return e
        deviation = self.variance.sqrt()
        least = FLOOR * deviation.square().mean().sqrt()
        if not least > 0:  # all clients are equal
            return e - self.mean.to(e.dtype)
        return ((e.double() - self.mean) / deviation.clamp(min=float(least))).to(e.dtype)
