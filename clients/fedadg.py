"""FedADG client (Zhang et al., "Federated Learning with Domain Generalization", 2021).

Features h = F(x) are aligned, class by class, with a reference h' = G(noise, y) that adapts to
them: least-squares adversarial losses as in the authors' code. F, the classifier and G are
aggregated; the discriminator D stays on the client. Departs from the authors' code: D gets the
features without a random projection; no local epochs without alignment come first; no label
smoothing. Novel clients get the global model."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.arrays import Arrays
from clients.base import Client, Config, Metrics
from clients.models.fedadg import Aligned
from clients.optimizers import SGD
from clients.protocol import StateUse
from clients.sgd import mini_batches
from partitions.datasets import Info
from partitions.settings import RATE, WIDTH, setting


class FedADGClient(Client):
    """`lr` trains F and the classifier on alignment·L_adv + (1 − alignment)·CE; `adversarial_lr`
    trains D and G. Each mini-batch updates D, then F and the classifier, then G."""

    needs_head = True
    personal = ("discriminator.",)
    rates = ("lr", "adversarial_lr")
    needs_state = StateUse.TRAINING

    alignment = setting(0.15, "weight of the adversarial loss beside the cross entropy", "[0, 1)")
    adversarial_lr = setting(0.01, "learning rate of discriminator and generator", RATE)
    feature_dim = setting(128, "width of the aligned features; 512 beyond MNIST", WIDTH)
    noise_dim = setting(10, "entries of the generator's noise", WIDTH)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert isinstance(self.model, Aligned)  # by `build`
        self.network = self.model

    @classmethod
    def build(cls, model: nn.Module, info: Info, *, feature_dim: int, noise_dim: int) -> nn.Module:
        """The target network with a feature layer, a generator and a discriminator."""
        return Aligned(model, info.num_classes, feature_dim, noise_dim)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Adversarial local training; ``loss`` is the mean of the predictor's."""
        self.load(arrays)
        self.network.train()
        discriminator, generator = self.network.discriminator, self.network.generator
        predict = SGD(self.network.predictor(), self.lr, self.momentum, self.weight_decay)
        discriminate = SGD(discriminator.parameters(), self.adversarial_lr)
        generate = SGD(generator.parameters(), self.adversarial_lr)
        samples, rows, total = self.share.train.to(self.device), self.rows(config), 0.0
        for x, y in mini_batches(samples, rows):
            h, reference, onehot = self.pair(x, y)
            _step(discriminate, self.discriminator_loss(h.detach(), reference.detach(), onehot))
            total += _step(predict, self.predictor_loss(h, y, onehot))
            _step(generate, self.generator_loss(reference, onehot))
        return self.arrays(), len(self.share.train), {"loss": total / len(rows)}

    def pair(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h = F(x), h' = G(noise, y) with noise ~ U[0, 1), and the one-hot labels."""
        onehot = F.one_hot(y, self.network.num_classes).to(x.dtype)
        noise = torch.rand(len(y), self.network.noise_dim, device=x.device, dtype=x.dtype)
        return self.network.features(x), self.network.generator(noise, onehot), onehot

    def discriminator_loss(self, h: Tensor, reference: Tensor, onehot: Tensor) -> Tensor:
        """E[(1 − D(h'|y))² + D(h|y)²]: D separates the reference from the features."""
        d = self.network.discriminator
        return ((1 - d(reference, onehot)).square() + d(h, onehot).square()).mean()

    def predictor_loss(self, h: Tensor, y: Tensor, onehot: Tensor) -> Tensor:
        """λ E[(1 − D(h|y))²] + (1 − λ) CE: features like the reference, which classify."""
        adversarial = (1 - self.network.discriminator(h, onehot)).square().mean()
        task = self.criterion(self.network.head(h), y)
        return self.alignment * adversarial + (1 - self.alignment) * task

    def generator_loss(self, reference: Tensor, onehot: Tensor) -> Tensor:
        """E[D(h'|y)²]: a reference like the features."""
        return self.network.discriminator(reference, onehot).square().mean()


def _step(optimizer: SGD, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())
