"""Networks with unusual parts, each with a `head` on features of 10 units."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 10


class Plain(nn.Module):
    """in-10-10-C with ReLU; `middle` sees the first layer's activations (n, 10)."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.first = nn.Linear(torch.Size(shape).numel(), WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)

    def features(self, x):
        return F.relu(self.second(self.middle(F.relu(self.first(x.flatten(1))))))

    def forward(self, x):
        return self.head(self.features(x))

    def middle(self, h):
        return h


class Norm(Plain):
    """With batch normalisation."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.norm = nn.BatchNorm1d(WIDTH)

    def middle(self, h):
        return self.norm(h)


class Dropout(Plain):
    """With dropout."""

    def middle(self, h):
        return F.dropout(h, 0.5, self.training)


class Frozen(Plain):
    """With a first layer that is not trained."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.first.requires_grad_(False)


class Tied(Plain):
    """With a third layer that shares the second one's weight."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.second.weight

    def middle(self, h):
        return F.relu(self.third(h))


class Buffers(Plain):
    """With a scalar parameter and scalar buffers, an order of the units, and a mask.

    Training counts mini-batches and tracks the mean activation."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("level", torch.tensor(0.0))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("order", torch.arange(WIDTH - 1, -1, -1, dtype=torch.int32))
        self.register_buffer("mask", torch.arange(WIDTH) > 0)

    def middle(self, h):
        if self.training:
            self.batches += 1
            self.level.lerp_(h.detach().mean(), 0.1)
        return self.gain * (h[:, self.order.long()] - self.level) * self.mask


class Everything(Buffers):
    """With all of these parts."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.second.weight
        self.first.requires_grad_(False)

    def middle(self, h):
        h = F.relu(self.third(super().middle(self.norm(h))))
        return F.dropout(h, 0.5, self.training)


class TiedHead(Plain):
    """With a head that shares the weight of the layer before it, as there are 10 classes."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.head.weight = self.second.weight
