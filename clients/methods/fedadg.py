"""FedADG client (Zhang et al., "Federated Learning with Domain Generalization", 2021).

A generator G learns reference features h' = G(noise, y). The features h = F(x) are aligned with
this reference label by label, by the least-squares adversarial losses of the authors' code. The
server averages F, the classifier and G; the discriminator D stays on the client. Novel clients get
the global model.

Departs from the authors' code: D gets the features without a random projection; there are no first
local epochs without alignment, and no label smoothing. In that code, D gets features in evaluation
mode, and a client sends the model of its best local epoch by validation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from clients.core.evaluation import label_vectors
from clients.core.protocol import StateUse
from clients.core.sgd import SGD, clip_gradients, mini_batches
from clients.models.head import HeadedNetwork, take_head
from fedapps.common.settings import RATE, WIDTH, setting
from partitions.datasets.loading import Info


class Generator(nn.Module):
    """Distribution generator: noise (n, m) and label vectors (n, C) → features (n, d) ≥ 0."""

    def __init__(self, noise_dim: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(noise_dim + num_classes, width)
        self.output = nn.Linear(width, width)

    def forward(self, noise: Tensor, label: Tensor) -> Tensor:
        """Reference features (n, d) of the labels."""
        hidden = F.leaky_relu(self.hidden(torch.cat([noise, label], 1)))
        return F.relu(self.output(hidden))


class Discriminator(nn.Module):
    """Features (n, d) and label vectors (n, C) → probability (n,) that they are reference."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width + num_classes, width)
        self.output = nn.Linear(width, 1)

    def forward(self, features: Tensor, label: Tensor) -> Tensor:
        """D(h | y) in (0, 1)."""
        hidden = F.leaky_relu(self.hidden(torch.cat([features, label], 1)))
        return self.output(hidden).sigmoid().squeeze(1)


class Aligned(HeadedNetwork):
    """The target network with a feature layer of `width`, a generator and a discriminator."""

    def __init__(self, model: nn.Module, num_classes: int, width: int, noise_dim: int) -> None:
        super().__init__()
        self.feature = nn.Linear(take_head(model).in_features, width)
        self.head = nn.Linear(width, num_classes)
        self.body = model
        self.generator = Generator(noise_dim, num_classes, width)
        self.discriminator = Discriminator(num_classes, width)
        self.noise_dim = noise_dim
        self.num_classes = num_classes

    def features(self, x: Tensor) -> Tensor:
        """h = F(x), (n, d) ≥ 0."""
        return F.relu(self.feature(self.body(x)))

    def predictor(self) -> list[nn.Parameter]:
        """The parameters of feature extractor and classifier."""
        return [*self.body.parameters(), *self.feature.parameters(), *self.head.parameters()]


class FedADGClient(Client):
    """`lr` trains F and the classifier on alignment·L_adv + (1 − alignment)·CE; `adversarial_lr`
    trains D and G. Each mini-batch updates D, then F and the classifier, then G."""

    needs_head = True
    personal = ("discriminator.",)
    rates = ("lr", "adversarial_lr")
    needs_state = StateUse.TRAINING

    model: Aligned  # by `build`

    alignment = setting(0.15, "weight of the adversarial loss beside the cross entropy", "[0, 1)")
    adversarial_lr = setting(0.01, "learning rate of discriminator and generator", RATE)
    feature_dim = setting(128, "width of the aligned features; 512 beyond MNIST", WIDTH)
    noise_dim = setting(10, "entries of the generator's noise", WIDTH)

    @classmethod
    def build(cls, model: nn.Module, info: Info, *, feature_dim: int, noise_dim: int) -> nn.Module:
        """The target network with a feature layer, a generator and a discriminator."""
        return Aligned(model, info.num_outputs, feature_dim, noise_dim)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Adversarial local training; ``loss`` is the mean loss of F and the classifier."""
        self.load(arrays)
        self.model.train()
        of_predictor = SGD(self.model.predictor(), self.lr, self.momentum, self.weight_decay)
        of_discriminator = SGD(self.model.discriminator.parameters(), self.adversarial_lr)
        of_generator = SGD(self.model.generator.parameters(), self.adversarial_lr)
        samples = self.share.train.to(self.device)
        rows = self.rows(config)
        total_loss = 0.0
        for x, y in mini_batches(samples, rows):
            h, reference, label = self.pair(x, y)
            loss = self.discriminator_loss(h.detach(), reference.detach(), label)
            self.step(of_discriminator, loss)
            total_loss += self.step(of_predictor, self.predictor_loss(h, y, label))
            self.step(of_generator, self.generator_loss(reference, label))
        return self.arrays(), len(self.share.train), {"loss": total_loss / max(len(rows), 1)}

    def step(self, optimizer: SGD, loss: Tensor) -> float:
        """One step on the loss, with clipped gradients; returns its value."""
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(optimizer.parameters(), self.local_clip_norm)
        optimizer.step()
        return float(loss.detach())

    def pair(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h = F(x), h' = G(noise, y) with noise ~ U[0, 1), and y as vectors, classes one-hot."""
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()  # x may be tokens
        label = label_vectors(y, self.model.num_classes).to(dtype)
        noise = torch.rand(len(y), self.model.noise_dim, device=x.device, dtype=dtype)
        return self.model.features(x), self.model.generator(noise, label), label

    def discriminator_loss(self, h: Tensor, reference: Tensor, label: Tensor) -> Tensor:
        """E[(1 − D(h'|y))² + D(h|y)²]: D separates the reference from the features."""
        d = self.model.discriminator
        return ((1 - d(reference, label)).square() + d(h, label).square()).mean()

    def predictor_loss(self, h: Tensor, y: Tensor, label: Tensor) -> Tensor:
        """λ E[(1 − D(h|y))²] + (1 − λ) CE: D takes the features for the reference."""
        adversarial = (1 - self.model.discriminator(h, label)).square().mean()
        task = self.criterion(self.model.head(h), y)
        return self.alignment * adversarial + (1 - self.alignment) * task

    def generator_loss(self, reference: Tensor, label: Tensor) -> Tensor:
        """E[D(h'|y)²]: D takes the reference for features."""
        return self.model.discriminator(reference, label).square().mean()
