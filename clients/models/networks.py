"""The papers' target networks, each with its last linear layer as `head`."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.models.head import HeadedNetwork
from partitions.datasets.words import CHARACTERS

Shape = tuple[int, ...]


class MLP(HeadedNetwork):
    """in-200-200-C with ReLU (FedTTA, MNIST); inputs of any shape are flattened."""

    def __init__(self, shape: Shape, num_classes: int, hidden: tuple[int, ...] = (200, 200)):
        super().__init__()
        widths = [torch.Size(shape).numel(), *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, hidden)."""
        x = x.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class ConvNet(HeadedNetwork):
    """conv 5×5 a → maxpool 2 → conv 5×5 b → maxpool 2 → `fc` (512) → C (McMahan et al.).

    Convolutions keep the size (padding 2), so images from 4×4 on fit."""

    def __init__(
        self, shape: Shape, num_classes: int, widths: tuple[int, int] = (32, 64), fc: int = 512
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(shape, "convnet", 4)
        self.conv1 = nn.Conv2d(channels, widths[0], 5, padding=2)
        self.conv2 = nn.Conv2d(widths[0], widths[1], 5, padding=2)
        self.fc = nn.Linear(widths[1] * (height // 4) * (width // 4), fc)
        self.head = nn.Linear(fc, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, fc)."""
        x = convolved(x, self.conv1, self.conv2)
        return F.relu(self.fc(x.flatten(1)))


class ConvNetBN(ConvNet):
    """ConvNet with batch normalisation after each convolution, for methods that need some."""

    def __init__(self, shape: Shape, num_classes: int, widths: tuple[int, int] = (32, 64)):
        super().__init__(shape, num_classes, widths)
        self.norm1, self.norm2 = (nn.BatchNorm2d(width) for width in widths)

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, 512)."""
        first = nn.Sequential(self.conv1, self.norm1)
        second = nn.Sequential(self.conv2, self.norm2)
        return F.relu(self.fc(convolved(x, first, second).flatten(1)))


class ConvNetATP(HeadedNetwork):
    """Three 3×3 convolutions 32/64/64 without bias, maxpool 2 after two of them → fc 64 → C (ATP).

    Each layer but the last has batch normalisation. Convolutions keep the size (padding 1, ours:
    the authors have none), so images from 4×4 on fit."""

    def __init__(self, shape: Shape, num_classes: int, widths: tuple[int, ...] = (32, 64, 64)):
        super().__init__()
        channels, height, width = image_shape(shape, "convnet-atp", 4)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=False)
            for a, b in itertools.pairwise((channels, *widths))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.fc = nn.Linear(widths[-1] * (height // 4) * (width // 4), 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, 64)."""
        *pooled, last = map(nn.Sequential, self.convolutions, self.norms)
        x = F.relu(last(convolved(x, *pooled)))
        return F.relu(self.norm(self.fc(x.flatten(1))))


class LeNet(HeadedNetwork):
    """conv 5×5 k → maxpool 2 → conv 5×5 2k → maxpool 2 → fc 120 → fc 84 → C (pFedHN).

    No padding: images must have at least 16×16 pixels."""

    def __init__(self, shape: Shape, num_classes: int, k: int = 16):
        super().__init__()
        channels, height, width = image_shape(shape, "lenet", 16)
        self.conv1 = nn.Conv2d(channels, k, 5)
        self.conv2 = nn.Conv2d(k, 2 * k, 5)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        self.fc1 = nn.Linear(2 * k * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, 84)."""
        x = convolved(x, self.conv1, self.conv2)
        return F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))


class OmniglotLeNet(HeadedNetwork):
    """Four 3×3 convolutions 16/32/64/64, each with maxpool 2 while there is room → fc 84 → C
    (pFedHN names the layers, not their sizes)."""

    def __init__(
        self, shape: Shape, num_classes: int, widths: tuple[int, ...] = (16, 32, 64, 64)
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(shape, "omniglot-lenet", 8)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise((channels, *widths))
        )
        for _ in widths:
            if min(height, width) > 1:
                height, width = height // 2, width // 2
        self.fc = nn.Linear(widths[-1] * height * width, 84)
        self.head = nn.Linear(84, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, 84)."""
        x = convolved(x, *self.convolutions)
        return F.relu(self.fc(x.flatten(1)))


class FeatureMLP(HeadedNetwork):
    """fc 500 → fc 500 → dropout 0.2 → C on precomputed features (ODPFL-HN)."""

    def __init__(self, shape: Shape, num_classes: int, hidden: int = 500, dropout: float = 0.2):
        super().__init__()
        self.body = MLP(shape, num_classes, (hidden, hidden))
        del self.body.head
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Activations (n, 500)."""
        return self.dropout(self.body.features(x))


class StackedLSTM(HeadedNetwork):
    """embedding → two LSTM layers → their last step → `fc`, if there is one → C (LEAF).

    Inputs are tokens (time) below `num_tokens`."""

    def __init__(
        self,
        shape: Shape,
        num_classes: int,
        num_tokens: int = len(CHARACTERS),
        embedding: int = 8,
        hidden: int = 256,
        fc: int = 0,
    ) -> None:
        super().__init__()
        if len(shape) != 1:
            raise ValueError(
                f"a network of LSTM layers takes tokens (time), not inputs of shape {shape}"
            )
        self.embedding = nn.Embedding(num_tokens, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.fc = nn.Linear(hidden, fc) if fc else None
        self.head = nn.Linear(fc or hidden, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The last step of the upper layer (n, hidden), or `fc` of it, which is linear as in LEAF's
        code."""
        steps, _ = self.lstm(self.embedding(x.long()))
        last: Tensor = steps[:, -1]
        return last if self.fc is None else self.fc(last)


def convolved(x: Tensor, *layers: nn.Module) -> Tensor:
    """ReLU(maxpool 2(layer(x))) of one convolution after the other; x itself without any.

    On a CPU the channels are last in memory: see `channels_last`."""
    if layers:
        x = channels_last(x)
    for layer in layers:
        x = F.relu(pooled(layer(x)))  # in the other order it is the same, and takes more time
    return x


def channels_last(x: Tensor) -> Tensor:
    """The images x (n, C, H, W), on a CPU with the channels last in memory.

    Convolutions then train in 0.65 to 0.8 of the time and predict in half. The convolution's output
    has these strides too, so a network that flattens by `view` must not get them."""
    if x.device.type != "cpu":
        return x
    if x.shape[1] == 1:  # the same memory; torch would keep the strides of channels first
        count, _, height, width = x.shape
        return x.reshape(count, height, width, 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


def pooled(x: Tensor) -> Tensor:
    """Max-pooling by 2, while there is room."""
    return F.max_pool2d(x, 2) if min(x.shape[2:]) > 1 else x


def image_shape(shape: Shape, name: str, smallest: int) -> Shape:
    """The shape. Raises ValueError unless it is that of images with at least `smallest` pixels a
    side."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ValueError(
            f"model {name!r} needs images of at least {smallest}×{smallest} pixels, "
            f"not inputs of shape {shape}; 'mlp' takes any input"
        )
    return shape
