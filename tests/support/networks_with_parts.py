"""Networks with unusual parts, each with a `head` on features of 10 units."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 10


class Plain(nn.Module):
    """in-10-10-C with ReLU, and the parts that a subclass names."""

    parts: tuple[str, ...] = ()

    def __init__(self, shape, num_classes):
        super().__init__()
        self.first = nn.Linear(torch.Size(shape).numel(), WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)
        if "buffers" in self.parts:
            self.gain = nn.Parameter(torch.tensor(1.0))
            self.register_buffer("level", torch.tensor(0.0))
            self.register_buffer("batches", torch.tensor(0))
            self.register_buffer("order", torch.arange(WIDTH - 1, -1, -1, dtype=torch.int32))
            self.register_buffer("mask", torch.arange(WIDTH) > 0)
        if "norm" in self.parts:
            self.norm = nn.BatchNorm1d(WIDTH)
        if "tied" in self.parts:
            self.third = nn.Linear(WIDTH, WIDTH)
            self.third.weight = self.second.weight
        self.first.requires_grad_("frozen" not in self.parts)

    def features(self, x):
        h = F.relu(self.first(x.flatten(1)))
        if "norm" in self.parts:
            h = self.norm(h)
        if "buffers" in self.parts:
            h = self.scale(h)
        if "tied" in self.parts:
            h = F.relu(self.third(h))
        if "dropout" in self.parts:
            h = F.dropout(h, 0.5, self.training)
        if "kept" in self.parts:
            self.activations = {"last": [h]}  # as for a figure, with what computed them
        return F.relu(self.second(h))

    def scale(self, h):
        """Training counts mini-batches and tracks the mean activation."""
        if self.training:
            self.batches += 1
            self.level.lerp_(h.detach().mean(), 0.1)
        return self.gain * (h[:, self.order.long()] - self.level) * self.mask

    def forward(self, x):
        return self.head(self.features(x))


class Norm(Plain):
    parts = ("norm",)


class Dropout(Plain):
    parts = ("dropout",)


class Frozen(Plain):
    parts = ("frozen",)


class Tied(Plain):
    parts = ("tied",)


class Buffers(Plain):
    parts = ("buffers",)


class Everything(Plain):
    parts = ("norm", "dropout", "frozen", "tied", "buffers", "kept")


class TiedHead(Plain):
    """With a head that shares the weight of the layer before it, as there are 10 classes."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes)
        self.head.weight = self.second.weight
