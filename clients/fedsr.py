"""FedSR client (Nguyen, Torr and Lim, NeurIPS 2022): a simple representation.

CE + α_L2R ‖z‖² + α_CMI KL(p(z|x) ‖ r(z|y)) with one sample z a input. Departs from the authors'
code: no learnt scale between p and r, and the squared norm, as the paper's bound has it. The
representation is as wide as the target network's features. Novel clients get the global model.
With `representation` = "widened" the network is that of FedTTA's comparison (Ye et al.), on MNIST
784-200-400-10."""

from typing import Any

from torch import Tensor, nn

from clients.base import Client
from clients.models.fedsr import Stochastic
from partitions.datasets import Info

REPRESENTATIONS = ("added", "widened")


def kl(mean: Tensor, scale: Tensor, r_mean: Tensor, r_scale: Tensor) -> Tensor:
    """KL(N(m, s²) ‖ N(m_r, s_r²)) (n,) of diagonal Gaussians, each argument (n, d)."""
    ratio = (scale.square() + (mean - r_mean).square()) / (2 * r_scale.square())
    return (r_scale.log() - scale.log() + ratio - 0.5).sum(1)


class FedSRClient(Client):
    """`l2r` is α_L2R, `cmi` is α_CMI."""

    needs_head = True

    def __init__(self, *args: Any, l2r: float = 0.01, cmi: float = 0.0005, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, value in (("l2r", l2r), ("cmi", cmi)):
            if value < 0:
                raise ValueError(f"fedsr.{name} is {value}; it must not be negative")
        if not isinstance(self.model, Stochastic):
            raise ValueError("the model has no stochastic representation; wrap it by build")
        self.network = self.model
        self.l2r, self.cmi = l2r, cmi

    @classmethod
    def build(cls, model: nn.Module, info: Info, *, representation: str = "added") -> nn.Module:
        """The target network with a Gaussian representation before its head."""
        if representation not in REPRESENTATIONS:
            known = ", ".join(REPRESENTATIONS)
            raise ValueError(f"unknown fedsr.representation {representation!r}; known: {known}")
        return Stochastic(model, info.num_classes, representation)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE + α_L2R E‖z‖² + α_CMI E KL(p(z|x) ‖ r(z|y))."""
        mean, scale = self.network.distribution(x)
        z = self.network.sample(mean, scale)
        l2r = z.square().sum(1).mean()
        cmi = kl(mean, scale, *self.network.reference(y)).mean()
        return self.criterion(self.network.head(z), y) + self.l2r * l2r + self.cmi * cmi
