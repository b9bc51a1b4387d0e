"""FedSR client (Nguyen, Torr and Lim, NeurIPS 2022): a simple representation.

CE + α_L2R ‖z‖² + α_CMI KL(p(z|x) ‖ r(z|y)) with one sample z for each input. Departs from the
authors' code: no trained scale between p and r, and the squared norm, as in the paper's bound. The
representation is as wide as the target network's features. Novel clients get the global model.
With `representation` = "widened" the network is that of FedTTA's comparison (Ye et al.), on MNIST
784-200-400-10."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from clients.base import Client
from clients.models.fedsr import Stochastic
from clients.scoring import by_parts
from partitions.datasets import Info
from partitions.settings import WEIGHT, setting


def kl(mean: Tensor, scale: Tensor, r_mean: Tensor, r_scale: Tensor) -> Tensor:
    """KL(N(m, s²) ‖ N(m_r, s_r²)) (n,) of diagonal Gaussians, each argument (n, d)."""
    ratio = (scale.square() + (mean - r_mean).square()) / (2 * r_scale.square())
    return (r_scale.log() - scale.log() + ratio - 0.5).sum(1)


class FedSRClient(Client):
    """`l2r` is α_L2R, `cmi` is α_CMI. Predictions use z's mean or, with `test_samples` > 0, the
    mean probabilities of so many draws (authors' code: 20). A served network uses z's mean."""

    needs_head = True

    l2r = setting(0.01, "weight of the squared norm of the representation", WEIGHT)
    cmi = setting(0.0005, "weight of the conditional mutual information's bound", WEIGHT)
    representation = setting(
        "added", "a layer on the features, or the last hidden layer, widened", ("added", "widened")
    )
    test_samples = setting(
        0, "draws of the representation whose probabilities are averaged; 0: its mean", "[0, 10000]"
    )

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert isinstance(self.model, Stochastic)  # by `build`
        self.network = self.model

    @classmethod
    def build(cls, model: nn.Module, info: Info, *, representation: str) -> nn.Module:
        """The target network with a Gaussian representation before its head."""
        return Stochastic(model, info.num_classes, representation)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE + α_L2R E‖z‖² + α_CMI E KL(p(z|x) ‖ r(z|y))."""
        mean, scale = self.network.distribution(x)
        z = self.network.sample(mean, scale)
        l2r = z.square().sum(1).mean()
        cmi = kl(mean, scale, *self.network.reference(y)).mean()
        return self.criterion(self.network.head(z), y) + self.l2r * l2r + self.cmi * cmi

    def predict(self, x: Tensor) -> Tensor:
        """The logits of z's mean (n, C), or log Σ_k p(y | z_k) / K over K draws."""
        return (
            by_parts(self._mean_probabilities, self.parts(x))
            if self.test_samples
            else super().predict(x)
        )

    def _mean_probabilities(self, x: Tensor) -> Tensor:
        mean, scale = self.network.distribution(x)
        draws = [self.network.draw(mean, scale) for _ in range(self.test_samples)]
        logs = torch.stack([self.network.head(z).log_softmax(1) for z in draws])
        return logs.logsumexp(0) - math.log(self.test_samples)
