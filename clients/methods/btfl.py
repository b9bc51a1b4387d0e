"""BTFL client (Zhou and Liu, 2025): two heads, weighted for each input by a Bayesian formula.

Training: CE + `sparsity` ‖f‖₁ / 32 of a mini-batch; see `clients.methods._two_heads` for the
personal head. A feature's level is round(tanh f), 0 or 1. The summary is the share of training
samples at each level, for each of D features. Test, without optimisation: S = Σ_d log(0.2 + 0.6
share) of an input's levels by the client's and by all clients' shares, entropies H of both heads,
H̄ their means in training; ρ = exp((S_l e^{H_l/H̄_l − 1} − S_g e^{H_g/log 100 − 1}) / D), λ = 1 + 4
tanh(ρ − 1), or 1 / (1 + 4 tanh(1/ρ − 1)) below ρ = 1. e = ∫ Beta(m; a, b) m / (m + (1 − m) λ) dm;
the output is e log p_g + (1 − e) log p_l. After a batch, a and b (1 at first) grow by the numbers
of inputs for which shares and both entropies favour the global, and the personal head.

From the authors' code, whose log 100 does not depend on the number of classes. Departs from it:
all clients' shares hold the client's own, and are of the round before; ρ = 1 gives λ = 1, not 0; a
and b are not rescaled. The integral, there from 0.01 to 0.99, is divided by the density's: without
that a large a would take the global head's weight away. But for these, it agrees with that code to
1e-5 (tests/test_authors_heads.py)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Beta

from clients.core.arrays import Arrays
from clients.core.client import Config, Metrics
from clients.core.normalisation import entropies
from clients.methods._two_heads import TwoHeads, TwoHeadsClient
from clients.models.head import head_of
from fedapps.common.settings import NONNEGATIVE, POSITIVE_INT, setting

GRID = torch.linspace(0.01, 0.99, 100)  # of the integral over m
SMALLEST = 1e-12  # of H̄_l, which underflows to 0 for a client of one class


def levels(f: Tensor) -> Tensor:
    """Of features f (n, d): 0 or 1, as whole numbers."""
    return f.tanh().round().clamp(0, 1).long()


def evidence(f: Tensor, shares: Tensor) -> Tensor:
    """S (n,) of features f (n, d) by shares (2, d)."""
    return (0.2 + 0.6 * shares.gather(0, levels(f))).log().sum(1)


def odds(rho: Tensor) -> Tensor:
    """λ of ρ; 1 / λ of 1 / ρ."""
    far = 1 + 4 * (torch.maximum(rho, 1 / rho) - 1).tanh()
    return torch.where(rho < 1, 1 / far, far)


def expected_weight(lam: Tensor, a: float, b: float) -> Tensor:
    """e (n,) of λ (n,): the integral by the trapezoidal rule."""
    m = GRID.to(lam)
    log_density = Beta(m.new_tensor(a), m.new_tensor(b)).log_prob(m)
    density = (log_density - log_density.max()).exp()
    inside = torch.trapezoid(density * m / (m + (1 - m) * lam[:, None]), m)
    return inside / torch.trapezoid(density, m)


@dataclass(frozen=True)
class ModelMixing:
    """(e, 1 − e) of inputs by `shares` (2, d), all clients' and the client's, and `means`, H̄_g and
    H̄_l."""

    shares: tuple[Tensor, Tensor]
    means: tuple[Tensor, Tensor]
    batch_size: int

    def __call__(self, g: Tensor, p: Tensor, f: Tensor) -> Tensor:
        """(n, 2), of log-probabilities (n, C) and features (n, d)."""
        a, b, weights = 1.0, 1.0, []
        for batch in zip(*(t.split(self.batch_size) for t in (g, p, f)), strict=True):
            h_g, h_l = map(entropies, batch[:2])
            s_g, s_l = (evidence(batch[2], share) for share in self.shares)
            tempered_g = s_g * (h_g / math.log(100) - 1).exp()
            tempered_l = s_l * (h_l / self.means[1].clamp(min=SMALLEST) - 1).exp()
            rho = ((tempered_l - tempered_g) / f.shape[1]).exp()
            weights.append(expected_weight(odds(rho), a, b))
            sure_g, sure_l = h_g < self.means[0], h_l < self.means[1]
            a += int(((s_l < s_g) & sure_g & (h_l > self.means[1])).sum())
            b += int(((s_l > s_g) & sure_l & (h_g > self.means[0])).sum())
        e = torch.cat(weights)
        return torch.stack([e, 1 - e], 1)


class LogTwoHeads(TwoHeads):
    """Both heads' log-probabilities."""

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p_g, log p_l (n, C), and features f (n, d)."""
        g, p, f = super().outputs(x)
        return g.log_softmax(1), p.log_softmax(1), f


class BTFLClient(TwoHeadsClient):
    """Both heads' log-probabilities, mixed."""

    heads = LogTwoHeads

    sparsity = setting(
        0.001, "weight of the sum of the features' absolute values, over 32", NONNEGATIVE
    )
    test_batch_size = setting(32, "inputs after which the prior of e is updated", POSITIVE_INT)

    @classmethod
    def first_summary(cls, width: int) -> Tensor:
        """Equal shares (2, d)."""
        return torch.full((2, width), 0.5)

    def summary(self, f: Tensor) -> Tensor:
        """The shares (2, d) of features at level 0 and 1."""
        high = levels(f).to(f.dtype).mean(0)
        return torch.stack([1 - high, high])

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Train the head, then the global model, whose loss reads its features."""

        def note(head: nn.Module, inputs: tuple[Tensor]) -> None:
            self.features = inputs[0]

        handle = head_of(self.model).register_forward_pre_hook(note)
        try:
            return super().train(arrays, config)
        finally:
            handle.remove()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE + `sparsity` ‖f‖₁ / 32."""
        loss = super().loss(x, y)
        return loss + self.sparsity * self.features.abs().sum() / 32

    def weighing(self, f: Tensor, y: Tensor) -> ModelMixing:
        """The weights by all clients' shares and the client's."""
        assert self.personal_head is not None
        with torch.no_grad():
            g, p = head_of(self.model)(f), f @ self.personal_head.T
        means = tuple(entropies(z.log_softmax(1)).mean() for z in (g, p))
        # the server's mean, perhaps noisy
        shares = self.received_summary.clamp(0, 1), self.summary(f)
        return ModelMixing(shares, (means[0], means[1]), self.test_batch_size)
