"""FedSR client (Nguyen, Torr and Lim, NeurIPS 2022): a simple representation.

Loss: CE + α_L2R ‖z‖² + α_CMI KL(p(z|x) ‖ r(z|y)), with one sample z of p(z|x) for
each input and a trained reference r(z|y). Departs from the authors' code: there is no trained scale
between p and r, and the norm is squared, as in the paper's bound. The representation is as wide as
the target network's features. Novel clients get the global model. FedTTA's comparison (Ye et al.)
has two further networks: with `representation` = "widened" that of MNIST, 784-200-400-10, and with
"widened-convolution" that of images, whose second convolution gives mean and deviation."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.client import Client
from clients.core.copies import copy_of
from clients.core.evaluation import by_parts
from clients.core.normalisation import class_logits
from clients.models.foreign import blank_inputs, layers_of
from clients.models.head import HeadedNetwork, take_head
from clients.models.networks import ConvNet, convolved
from fedapps.common.seeds import drawing
from fedapps.common.settings import NONNEGATIVE, setting
from fedapps.common.tasks import CLASS_PROBABILITIES
from partitions.datasets.loading import Info


def widen(model: nn.Module, width: int, shape: tuple[int, ...]) -> None:
    """Double the outputs of the linear layer whose outputs are the model's `width` features.

    Raises ValueError if the model has no such layer."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, layer in reversed(linear.items()):
        if layer.out_features == width and _widens(model, name, shape):
            wider = nn.Linear(layer.in_features, 2 * width).to(layer.weight)
            model.set_submodule(name, wider)
            return
    raise ValueError(
        f"{type(model).__name__} has no last hidden layer of {width} units that could be widened; "
        f"it has {layers_of(model)}: set fedsr.representation to 'added'"
    )


def _widens(model: nn.Module, name: str, shape: tuple[int, ...]) -> bool:
    """Whether doubling the layer's outputs doubles the model's features."""
    with drawing(0), torch.no_grad():
        trial = copy_of(model).eval()
        layer = trial.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        x = blank_inputs(trial, shape)
        trial.set_submodule(name, nn.Linear(layer.in_features, 2 * layer.out_features).to(x))
        try:
            features = trial(x)
        except RuntimeError:
            return False
    return features.shape == (len(x), 2 * layer.out_features)


class WidenedConvolutions(nn.Module):
    """A ConvNet's convolutions, the second with twice as many channels; (n, *shape) → (n, 2d)."""

    def __init__(self, model: ConvNet) -> None:
        super().__init__()
        self.conv1 = model.conv1
        narrow = model.conv2
        wider = nn.Conv2d(narrow.in_channels, 2 * narrow.out_channels, 5, padding=2)
        self.conv2 = wider.to(narrow.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The first half comes from the first half of the channels."""
        return convolved(x, self.conv1, self.conv2).flatten(1)


class Stochastic(HeadedNetwork):
    """z ~ N(m(x), s(x)²) between the target network's features and its head.

    With `layer` = "added", a linear layer on the features gives mean and deviation. With "widened"
    the last hidden layer is twice as wide, and its features are mean and deviation. By its ReLU no
    mean is then below 0, and no deviation below softplus(0) = ln 2. With "widened-convolution" they
    come from a ConvNet's second convolution, and z goes through its hidden layer `above` the head.

    z is sampled in training mode; in evaluation mode it is the mean. `reference_mean` and
    `reference_scale` (C, d) define r(z|y), a trained Gaussian for each class with the deviation
    softplus(reference_scale)."""

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        layer: str = "added",
        shape: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.head = take_head(model)
        self.body: nn.Module = model
        width = self.head.in_features
        self.representation: nn.Module = nn.Identity()
        self.above: nn.Module = nn.Identity()  # between z and the head
        if layer == "added":
            self.representation = nn.Linear(width, 2 * width)
        elif layer == "widened":
            widen(model, width, shape)
        elif type(model) is ConvNet:
            self.body = WidenedConvolutions(model)
            self.above = nn.Sequential(model.fc, nn.ReLU())
            width = model.fc.in_features
        else:
            raise ValueError(
                f"fedsr.representation is {layer!r}, but {type(model).__name__} is not a convnet; "
                "choose 'added' or 'widened'"
            )
        self.reference_mean = nn.Parameter(torch.zeros(num_classes, width))
        self.reference_scale = nn.Parameter(torch.ones(num_classes, width))

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """m(x) and s(x) > 0, each (n, d)."""
        mean, scale = self.representation(self.body(x)).chunk(2, dim=1)
        return mean, F.softplus(scale)

    def reference(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation (n, d) of r(z|y) for the labels y (n,)."""
        return self.reference_mean[y], F.softplus(self.reference_scale)[y]

    def draw(self, mean: Tensor, scale: Tensor) -> Tensor:
        """z (n, d), drawn from N(m, s²)."""
        return mean + scale * torch.randn_like(scale)

    def sample(self, mean: Tensor, scale: Tensor) -> Tensor:
        """z (n, d): drawn in training mode, the mean in evaluation mode."""
        return self.draw(mean, scale) if self.training else mean

    def features(self, x: Tensor) -> Tensor:
        """What the head gets for the inputs x (n, *shape): z (n, d), or the layer above it."""
        features: Tensor = self.above(self.sample(*self.distribution(x)))
        return features

    def classify(self, z: Tensor) -> Tensor:
        """The logits (n, C) of a representation z (n, d)."""
        logits: Tensor = self.head(self.above(z))
        return logits


def kl_gaussian(mean: Tensor, scale: Tensor, r_mean: Tensor, r_scale: Tensor) -> Tensor:
    """KL(N(m, s²) ‖ N(m_r, s_r²)) (n,) of diagonal Gaussians, each argument (n, d)."""
    ratio = (scale.square() + (mean - r_mean).square()) / (2 * r_scale.square())
    return (r_scale.log() - scale.log() + ratio - 0.5).sum(1)


class FedSRClient(Client):
    """`l2r` is α_L2R, `cmi` is α_CMI.

    Predictions use z's mean or, with `test_samples` > 0, the mean probabilities over this number of
    draws (authors' code: 20). A served network uses z's mean."""

    tasks = CLASS_PROBABILITIES
    needs_head = True
    model: Stochastic  # by `build`

    l2r = setting(0.01, "weight of the squared norm of the representation", NONNEGATIVE)
    cmi = setting(0.0005, "weight of the conditional mutual information's bound", NONNEGATIVE)
    representation = setting(
        "added",
        "layer that gives z: added on the features; widened: the last hidden one; "
        "widened-convolution: convnet's second one",
        ("added", "widened", "widened-convolution"),
    )
    test_samples = setting(
        0,
        "draws of the representation over which predictions are averaged; 0: use its mean",
        "[0, 10000]",
    )

    @classmethod
    def build(cls, model: nn.Module, info: Info, *, representation: str) -> nn.Module:
        """The target network with a Gaussian representation before its head."""
        return Stochastic(model, info.num_classes, representation, tuple(info.shape))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE + α_L2R E‖z‖² + α_CMI E KL(p(z|x) ‖ r(z|y))."""
        mean, scale = self.model.distribution(x)
        z = self.model.sample(mean, scale)
        l2r = z.square().sum(1).mean()
        cmi = kl_gaussian(mean, scale, *self.model.reference(y)).mean()
        return self.criterion(self.model.classify(z), y) + self.l2r * l2r + self.cmi * cmi

    def predict(self, x: Tensor) -> Tensor:
        """The logits of z's mean (n, C), or log Σ_k p(y | z_k) / K over K draws; one output for two
        classes is the difference of theirs."""
        if not self.test_samples:
            return super().predict(x)
        return by_parts(self._mean_probabilities, self.parts(x))

    def _mean_probabilities(self, x: Tensor) -> Tensor:
        mean, scale = self.model.distribution(x)
        log_probabilities = []
        for _ in range(self.test_samples):
            z = self.model.draw(mean, scale)
            outputs = self.model.classify(z)
            log_probabilities.append(class_logits(outputs).log_softmax(1))
        # The log of a mean of probabilities, without leaving the logarithms.
        log_mean = torch.stack(log_probabilities).logsumexp(0) - math.log(self.test_samples)
        if outputs.shape[1] > 1:
            return log_mean
        return log_mean[:, 1:] - log_mean[:, :1]  # the one output of two classes
