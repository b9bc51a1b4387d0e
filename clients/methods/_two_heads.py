"""Clients that mix the logits of the global model with those of a personal head, input by input.

The personal head W (C, d) has no bias and stays on the client. Before local training and before a
prediction, the client trains it on the features f of the received body. The client also sends a
summary of its training features; the server returns the plain mean of all summaries. A novel client
has neither head nor summary: it predicts by the global model."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from clients.core.copies import copy_of
from clients.core.evaluation import by_parts
from clients.core.protocol import StateUse
from clients.core.sgd import sgd
from clients.models.head import head_of, take_head
from fedapps.common.memory_limits import num_parts
from fedapps.common.seeds import seed_of
from fedapps.common.settings import COUNT, setting
from fedapps.common.tasks import CLASSES
from partitions.datasets.loading import Info
from partitions.shares import Samples

# Name of the summary in messages. It is a parameter, because cohorts refuse networks with buffers.
# No loss reads it, so no step changes it.
SUMMARY = "feature_summary"
PERSONAL_HEAD = "head/personal"  # W in the client's state
# The weights e (n, 2) of both heads, from their logits g, p (n, C) and the features f (n, d).
Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


class TwoHeads(nn.Module):
    """`model` as a body and its head, with the personal head W beside it."""

    def __init__(self, model: nn.Module, personal_head: Tensor) -> None:
        super().__init__()
        self.head = take_head(model)
        self.body = model
        self.personal_head = nn.Parameter(personal_head)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """e_g g + e_l p (n, C) for weights e (2,) or (n, 2)."""
        g, p, _ = self.outputs(x)
        return mixed(e, g, p)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits g and p (n, C), and features f (n, d), of inputs x (n, *shape)."""
        f = self.body(x)
        return self.head(f), F.linear(f, self.personal_head), f

    def outputs_of(self, x: Tensor, megabytes: float) -> tuple[Tensor, Tensor, Tensor]:
        """As `outputs`, but without gradients and in parts of at most about `megabytes`."""
        with torch.no_grad():
            parts = map(self.outputs, x.tensor_split(num_parts(x.shape, megabytes)))
            g, p, f = map(torch.cat, zip(*parts, strict=True))
        return g, p, f


def mixed(e: Tensor, g: Tensor, p: Tensor) -> Tensor:
    """e_g g + e_l p (n, C)."""
    return e[..., :1] * g + e[..., 1:] * p


class Weigher(nn.Module):
    """A module around a dataclass `weigh`, which computes the weights e.

    The dataclass's tuples of tensors become buffers: they move with the network and are saved."""

    def __init__(self, weigh: Any) -> None:
        super().__init__()
        self.weigh = weigh
        self.tuple_lengths: dict[str, int] = {}  # by field
        for field in fields(weigh):
            value = getattr(weigh, field.name)
            if not isinstance(value, tuple):
                continue
            self.tuple_lengths[field.name] = len(value)
            for number, tensor in enumerate(value):
                self.register_buffer(f"{field.name}_{number}", tensor.clone())

    def forward(self, g: Tensor, p: Tensor, f: Tensor) -> Tensor:
        """e (n, 2) of logits or log-probabilities g and p (n, C) and features f (n, d)."""
        tuples = {}
        for name, length in self.tuple_lengths.items():
            tuples[name] = tuple(self.get_buffer(f"{name}_{i}") for i in range(length))
        weigh = replace(self.weigh, **tuples)
        e: Tensor = weigh(g, p, f)
        return e


class MixedNetwork(nn.Module):
    """e_g g + e_l p of inputs, where `weigh` gives e; the order of the inputs may matter."""

    def __init__(self, heads: TwoHeads, weigh: Weigh, megabytes: float) -> None:
        super().__init__()
        self.heads = heads
        self.weigh = Weigher(weigh)
        self.megabytes = megabytes

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, C) of inputs x (n, *shape)."""
        g, p, f = self.heads.outputs_of(x, self.megabytes)
        return mixed(self.weigh(g, p, f), g, p)


class TwoHeadsClient(Client):
    """FedAvg's client with a personal head. A subclass defines the summary and the weights."""

    tasks: tuple[str, ...] = (CLASSES,)
    also_scores_global_model = True
    needs_head = True
    needs_state = StateUse.PREDICTIONS
    heads = TwoHeads

    head_epochs = setting(1, "epochs in which the personal head trains on the received body", COUNT)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.personal_head: Tensor | None = None  # W; None: the global model predicts

    def summary(self, f: Tensor) -> Tensor:
        """The summary of the training features f (n, d) that the client sends."""
        raise NotImplementedError

    def weighing(self, f: Tensor, y: Tensor) -> Weigh:
        """The function that weighs the heads, from training features f (n, d) and labels y (n,)."""
        raise NotImplementedError

    @classmethod
    def first_summary(cls, width: int) -> Tensor:
        """The server's summary before any client has trained; `width` is d."""
        return torch.ones(width)

    @classmethod
    def build(cls, model: nn.Module, info: Info, /) -> nn.Module:
        """The network with the summary."""
        model = super().build(model, info)
        summary = cls.first_summary(head_of(model).in_features)
        model.register_parameter(SUMMARY, nn.Parameter(summary))
        return model

    def load(self, arrays: Arrays) -> None:
        """Set the global model, without a personal head."""
        super().load(arrays)
        self.personal_head = None

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Train the personal head on the received body, then the global model."""
        self.load(arrays)
        head, f, _ = self.fit_head(config)
        self.state |= {PERSONAL_HEAD: head.cpu().numpy()}
        loss = self.fit_locally(config)
        self.model.get_parameter(SUMMARY).data.copy_(self.summary(f))
        return self.arrays(), len(self.share.train), {"loss": loss}

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load the global model; a training client trains its head on the body."""
        super().receive(arrays, config)
        if self.share.novel or self.share.unlabeled or not len(self.share.train):
            return
        # The round is left out, so the batches are the same in every evaluation. A saved run is
        # then scored as it was during training.
        self.personal_head, f, y = self.fit_head({})
        self.weigh = self.weighing(f, y)

    @property
    def received_summary(self) -> Tensor:
        """The server's summary; valid until local training changes the model."""
        return self.model.get_parameter(SUMMARY).detach().clone()

    def fit_head(self, config: Config) -> tuple[Tensor, Tensor, Tensor]:
        """W (C, d) after its epochs on the body, the training features (n, d) and labels (n,)."""
        body = self.network()
        take_head(body)
        x, y = self.share.train.to(self.device)[:]
        f = by_parts(body, self.parts(x))
        features = Samples(f, y, torch.arange(len(y), device=f.device), scale=1.0)
        head = nn.Parameter(self.previous_head(f))

        def head_loss(f: Tensor, y: Tensor) -> Tensor:
            return self.criterion(F.linear(f, head), y)

        sgd(
            [head],
            features,
            self.rows(config, "head", epochs=self.head_epochs),
            head_loss,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        return head.detach(), f, y

    def previous_head(self, f: Tensor) -> Tensor:
        """W of the previous round, at first random like torch's linear layers."""
        if PERSONAL_HEAD in self.state:
            return torch.from_numpy(self.state[PERSONAL_HEAD].copy()).to(f)
        classes = head_of(self.model).out_features
        width = f.shape[1]
        generator = torch.Generator().manual_seed(seed_of(self.seed, "personal head", self.client))
        uniform = 2 * torch.rand((classes, width), generator=generator) - 1
        return (uniform / width**0.5).to(f)

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C) of both heads, mixed; without a personal head those of the global model."""
        self.intermediate_logits = {}
        if self.personal_head is None:
            return super().predict(x)
        with torch.no_grad():
            return self.personal_model(x)(x)

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network that mixes both heads; without a personal head the global model."""
        if self.personal_head is None:
            return self.network()
        return MixedNetwork(self.two_heads(), self.weigh, self.pass_megabytes).eval()

    def two_heads(self) -> TwoHeads:
        """A copy of the received network with the personal head."""
        assert self.personal_head is not None
        return self.heads(self.network(), self.personal_head.clone())

    def network(self) -> nn.Module:
        """A copy of the loaded network without the summary, in evaluation mode."""
        model = copy_of(self.model).eval()
        delattr(model, SUMMARY)
        return model
