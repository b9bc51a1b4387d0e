"""Networks as people have them, for inputs (1, 8, 8): forms that no package's network has."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LogProbabilities(nn.Module):
    """Its outputs are no linear layer's: they end in `log_softmax`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.second = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.second(F.relu(self.first(x.flatten(1)))), dim=1)


class Scaled(nn.Module):
    """A learnt temperature behind the last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 24)
        self.out = nn.Linear(24, 10)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(x.flatten(1)))) * self.temperature


class ViewFlattens(nn.Module):
    """`view` needs contiguous samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(144, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv(x)).view(x.shape[0], -1))


class HeadIsFirst(nn.Module):
    """The layer called `head` is the first one, and the classifier is registered before it."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(24, 10)
        self.head = nn.Linear(64, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.relu(self.head(x.flatten(1))))


class WithDropout(nn.Module):
    """Another function in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 24)
        self.norm = nn.BatchNorm1d(24)
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(self.norm(self.body(x.flatten(1))), training=self.training))


class NamedOutputs(nn.Module):
    """It gives a dict, as many libraries' networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.out(x.flatten(1))}


class AuxiliaryOutputs(nn.Module):
    """In training it also gives a second classifier's logits, which nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 24)
        self.side = nn.Linear(24, 10)
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = torch.relu(self.body(x.flatten(1)))
        return (self.out(h), self.side(h)) if self.training else self.out(h)


class SingleLogit(nn.Module):
    """One output for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1))


class FrozenBody(nn.Module):
    """A frozen backbone of another type, under a classifier that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(64, 24).bfloat16().requires_grad_(False)
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.backbone(x.flatten(1).bfloat16()).float())


class TiedLayers(nn.Module):
    """Two names of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 64)
        self.decode = nn.Linear(64, 64)
        self.out = nn.Linear(64, 10)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.decode(torch.relu(self.encode(x.flatten(1))))))


class RepeatedLayer(nn.Module):
    """Two names of one layer, which is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 64)
        self.decode = self.encode
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.decode(torch.relu(self.encode(x.flatten(1))))))


class BatchStatistics(nn.Module):
    """Batch normalisation without running statistics: a single input cannot be normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 24)
        self.norm = nn.BatchNorm1d(24, track_running_stats=False)
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.body(x.flatten(1)))))


def compiled() -> nn.Module:
    """Each of its names begins with `_orig_mod.`."""
    return torch.compile(ViewFlattens())  # type: ignore[return-value]


def parallel() -> nn.Module:
    """Each of its names begins with `module.`, also inside, and an inner part is compiled."""
    inner = nn.Sequential(nn.Flatten(), torch.compile(nn.Linear(64, 8)))
    return nn.DataParallel(nn.Sequential(nn.DataParallel(inner), nn.Linear(8, 10)))


class EndsInSigmoid(nn.Module):
    """One probability for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.out(torch.relu(self.body(x.flatten(1)))))


class Squeezed(nn.Module):
    """A regression whose outputs are (n,)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.body(x.flatten(1)))).squeeze()


class Mixed(nn.Module):
    """Trained layers in bfloat16, a frozen one of bytes, and logits in an object."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randint(-3, 3, (64, 32), dtype=torch.int8)
        self.fixed = nn.Parameter(table, requires_grad=False)
        self.body = nn.Linear(32, 24).bfloat16()
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> SimpleNamespace:
        h = (x.flatten(1) @ self.fixed.float() / 20).bfloat16()
        return SimpleNamespace(logits=self.out(torch.relu(self.body(h)).float()))


class NarrowNorm(nn.Module):
    """Batch normalisation in bfloat16, which numpy lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 24).bfloat16()
        self.norm = nn.BatchNorm1d(24).bfloat16()
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.body(x.flatten(1).bfloat16()))
        return self.out(torch.relu(h).float())


class Complex(nn.Module):
    """Trained complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 24, dtype=torch.cfloat))
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x.flatten(1).to(torch.cfloat) @ self.weight).abs())
