"""Running mean and deviation of clients' descriptors, by which a server centres and scales them.

An encoder's descriptors of clients that are much alike differ by thousandths of their norm, and a
hypernetwork, made for embeddings from N(0, I), then hardly tells its clients apart. The statistics
are of training clients alone; what they do to a private descriptor is post-processing."""

import torch
from torch import Tensor

FLOOR = 1e-3  # least deviation of an entry, in deviations of all entries


class Moments:
    """Mean μ and variance (d,) over training clients, by entry; float64.

    A round's statistics count by `rate` in (0, 1], those before by the rest; the first ones are
    taken as they are. Before them nothing is centred or scaled."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.mean, self.variance = torch.zeros(0), torch.zeros(0)

    def update(self, values: Tensor) -> None:
        """Take in descriptors (m, d) of a round. The variance is about the new mean:
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
        if not least > 0:  # clients do not differ at all
            return e - self.mean.to(e.dtype)
        return ((e.double() - self.mean) / deviation.clamp(min=float(least))).to(e.dtype)
