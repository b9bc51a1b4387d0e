"""Running mean and deviation of clients' descriptors, with which a server standardizes them.

Descriptors of similar clients differ by thousandths of their norm. A hypernetwork, initialised for
embeddings from N(0, I), would then generate nearly the same model for all clients. The statistics
are those of training clients; applied to a private descriptor they are post-processing."""

import torch
from torch import Tensor

# Smallest deviation of an entry, relative to the root mean square of all entries' deviations.
FLOOR = 1e-3


class Moments:
    """Mean μ (d,) and variance σ² (d,) of each entry over training clients, in float64.

    `rate` a in (0, 1] is the weight of a round's statistics; earlier ones have the weight 1 − a.
    Before the first `update`, `scaled` returns descriptors as they are."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.mean = torch.zeros(0)  # empty until the first update
        self.variance = torch.zeros(0)

    def update(self, values: Tensor) -> None:
        """Add the descriptors (m, d) of a round. The variance is about the new mean:
        σ² ← (1 − a)(σ² + a(x̄ − μ)²) + a s², μ ← μ + a(x̄ − μ)."""
        values = values.detach().double()
        mean = values.mean(0)
        variance = values.var(0, correction=0)
        if not len(self.mean):
            self.mean = mean
            self.variance = variance
            return
        a = self.rate
        difference = mean - self.mean
        self.variance = (1 - a) * (self.variance + a * difference.square()) + a * variance
        self.mean = self.mean + a * difference

    def scaled(self, e: Tensor) -> Tensor:
        """(e − μ)/σ for descriptors e (…, d), in their dtype; no gradient flows to μ and σ."""
        if not len(self.mean):
            return e
        deviation = self.variance.sqrt()
        smallest = FLOOR * deviation.square().mean().sqrt()
        if not smallest > 0:  # all clients are equal
            return e - self.mean.to(e.dtype)
        centred = e.double() - self.mean
        return (centred / deviation.clamp(min=float(smallest))).to(e.dtype)
