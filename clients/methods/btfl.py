"""BTFL client (Zhou and Liu, 2025): two heads, weighted for each input by a Bayesian formula.

g marks the global and l the personal head; `clients.methods._two_heads` explains both.

Training: CE + `sparsity` ‖f‖₁ / 32 of a mini-batch with D features f. The level of a feature is
round(tanh f), 0 or 1. The summary is the share of training samples at each level of each feature.

Test, for each input and without optimisation:
- evidence S = Σ_d log(0.2 + 0.6 share_d) of the input's levels, S_l by the client's shares and S_g
  by the mean shares of all clients;
- entropies H_g and H_l of both heads' predictions, with means H̄ over the training samples;
- ρ = exp((S_l e^{H_l/H̄_l − 1} − S_g e^{H_g/log 100 − 1}) / D);
- λ = 1 + 4 tanh(ρ − 1) for ρ ≥ 1, else 1 / (1 + 4 tanh(1/ρ − 1));
- e = ∫ Beta(m; a, b) m / (m + (1 − m) λ) dm, and the output e log p_g + (1 − e) log p_l.
a and b start at 1. After each batch, a grows by the number of inputs for which the evidence and
both entropies favour the global head, b by the number for which they favour the personal head.

The formulas are those of the authors' code, also log 100, which does not depend on the number of
classes. Departs from that code: the shares of all clients include the client's and are those of the
previous round; ρ = 1 gives λ = 1, not 0; a and b are not rescaled. The integral from 0.01 to 0.99
is divided by the integral of the density, because a large a would otherwise diminish the global
head's weight. Apart from this, it agrees with that code to 1e-5 (tests/test_authors_heads.py)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Beta

from clients.core.arrays import Arrays
from clients.core.client import Config, Metrics
from clients.core.layer_inputs import before_calls
from clients.core.normalisation import entropies
from clients.methods._two_heads import TwoHeads, TwoHeadsClient
from clients.models.head import head_of
from fedapps.common.settings import NONNEGATIVE, POSITIVE_INT, setting
from fedapps.common.tasks import CLASSES

GRID = torch.linspace(0.01, 0.99, 100)  # values of m for the integral
SMALLEST = 1e-12  # least H̄_l, which underflows to 0 for a client with one class


def levels(f: Tensor) -> Tensor:
    """Levels (n, d) of features f (n, d): integers 0 or 1."""
    return f.tanh().round().clamp(0, 1).long()


def evidence(f: Tensor, shares: Tensor) -> Tensor:
    """S (n,) of features f (n, d) by shares (2, d)."""
    return (0.2 + 0.6 * shares.gather(0, levels(f))).log().sum(1)


def odds(rho: Tensor) -> Tensor:
    """λ (n,) of ρ (n,)."""
    at_least_one = 1 + 4 * (torch.maximum(rho, 1 / rho) - 1).tanh()
    return torch.where(rho < 1, 1 / at_least_one, at_least_one)


def expected_weight(lam: Tensor, a: float, b: float) -> Tensor:
    """e (n,) of λ (n,); the integral by the trapezoidal rule."""
    m = GRID.to(lam)
    log_density = Beta(m.new_tensor(a), m.new_tensor(b)).log_prob(m)
    density = (log_density - log_density.max()).exp()
    inside = torch.trapezoid(density * m / (m + (1 - m) * lam[:, None]), m)
    return inside / torch.trapezoid(density, m)


@dataclass(frozen=True)
class ModelMixing:
    """The weights (e, 1 − e) of both heads.

    `shares` are those of all clients and of the client, each (2, d); `means` are H̄_g and H̄_l."""

    shares: tuple[Tensor, Tensor]
    means: tuple[Tensor, Tensor]
    batch_size: int

    def __call__(self, g: Tensor, p: Tensor, f: Tensor) -> Tensor:
        """(n, 2), of log-probabilities (n, C) and features (n, d)."""
        shares_g, shares_l = self.shares
        mean_h_g, mean_h_l = self.means
        a = 1.0
        b = 1.0
        weights = []
        for start in range(0, len(f), self.batch_size):
            batch = slice(start, start + self.batch_size)
            h_g = entropies(g[batch])
            h_l = entropies(p[batch])
            s_g = evidence(f[batch], shares_g)
            s_l = evidence(f[batch], shares_l)
            tempered_g = s_g * (h_g / math.log(100) - 1).exp()
            tempered_l = s_l * (h_l / mean_h_l.clamp(min=SMALLEST) - 1).exp()
            rho = ((tempered_l - tempered_g) / f.shape[1]).exp()
            weights.append(expected_weight(odds(rho), a, b))
            favours_g = (s_l < s_g) & (h_g < mean_h_g) & (h_l > mean_h_l)
            favours_l = (s_l > s_g) & (h_l < mean_h_l) & (h_g > mean_h_g)
            a += int(favours_g.sum())
            b += int(favours_l.sum())
        e = torch.cat(weights)
        return torch.stack([e, 1 - e], 1)


class LogTwoHeads(TwoHeads):
    """Both heads with log-probabilities in place of logits."""

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p_g, log p_l (n, C), and features f (n, d)."""
        g, p, f = super().outputs(x)
        return g.log_softmax(1), p.log_softmax(1), f


class BTFLClient(TwoHeadsClient):
    """Predicts by the weighted log-probabilities of both heads."""

    tasks = (CLASSES,)
    heads = LogTwoHeads

    sparsity = setting(
        0.001, "weight of the sum of the features' absolute values, divided by 32", NONNEGATIVE
    )
    test_batch_size = setting(32, "inputs after which a and b are updated", POSITIVE_INT)

    @classmethod
    def first_summary(cls, width: int) -> Tensor:
        """Equal shares (2, d)."""
        return torch.full((2, width), 0.5)

    def summary(self, f: Tensor) -> Tensor:
        """The shares (2, d) of features at level 0 and 1."""
        high = levels(f).to(f.dtype).mean(0)
        return torch.stack([1 - high, high])

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Train the personal head, then the global model."""

        def keep_features(f: Tensor) -> None:
            self.features = f  # for `loss`

        handle = before_calls(head_of(self.model), keep_features)
        try:
            return super().train(arrays, config)
        finally:
            handle.remove()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE + `sparsity` ‖f‖₁ / 32."""
        loss = super().loss(x, y)
        return loss + self.sparsity * self.features.abs().sum() / 32

    def weighing(self, f: Tensor, y: Tensor) -> ModelMixing:
        """The weights by the shares of all clients and of the client."""
        assert self.personal_head is not None
        with torch.no_grad():
            g = head_of(self.model)(f)
            p = f @ self.personal_head.T
        mean_h_g = entropies(g.log_softmax(1)).mean()
        mean_h_l = entropies(p.log_softmax(1)).mean()
        # Privacy may add noise to the server's shares.
        shares_g = self.received_summary.clamp(0, 1)
        shares_l = self.summary(f)
        return ModelMixing((shares_g, shares_l), (mean_h_g, mean_h_l), self.test_batch_size)
