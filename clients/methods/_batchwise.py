"""Clients that adapt FedAvg's model to one batch of unlabeled inputs after another, when scored.

All the inputs of a served client's update are one batch. Statistics and gradients of very many are
means over parts of `pass-megabytes`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clients.core.client import Client
from clients.core.evaluation import by_parts
from fedapps.common.settings import COUNT, setting
from partitions.shares import Samples

Changes = dict[str, Tensor]  # arrays of the adapted network that differ, by name
Norm = nn.modules.batchnorm._BatchNorm
STATISTICS = ("running_mean", "running_var")


class BatchwiseClient(Client):
    """FedAvg's client that, when scored, adapts to each batch of the inputs in their order.

    A batch has `test_batch_size` inputs, a novel client's `novel_batch` if that is set."""

    batchwise = True

    test_batch_size = setting(20, "inputs that a prediction adapts to together; 0: all", COUNT)

    def changes(self, x: Tensor) -> Changes:
        """What adaptation to x, the next batch of the stream, changes in the network."""
        raise NotImplementedError

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the next batch, by the network that is adapted to it."""
        self._changes = self.changes(x)
        return by_parts(partial(functional_call, self.model, self._changes), self.parts(x))

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C), each batch by the network that is adapted to it."""
        return torch.cat([self.update(batch) for batch in self.test_batches(x)])

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network that is adapted to the last batch."""
        model = super().personal_model(x)
        model.load_state_dict(self._changes, strict=False)
        return model

    def test_batches(self, x: Tensor) -> Iterator[Tensor]:
        """x in batches; the last one may be shorter. Each begins a stream, unless `online`."""
        for number, batch in enumerate(x.split(self.prediction_batch or max(len(x), 1))):
            if number == 0 or not self.online:
                self.stream = {}
            yield batch

    @property
    def online(self) -> bool:
        """Whether the batches that a prediction adapts to are one stream."""
        return self.share.novel and self.novel_stream

    @property
    def prediction_batch(self) -> int:
        """The inputs of a batch; 0: all."""
        return (self.share.novel and self.novel_batch) or self.test_batch_size


class HoldingOut(Client):
    """A client that holds out some training samples: the network is not trained on `held`.

    They are evenly spaced among the training samples. A network that another run trained has seen
    them. Without enough samples, or with `held_out` = 0, `held` are the training samples."""

    held_out = setting(0.2, "share of the training samples that the network does not see", "[0, 1)")

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        train = self.share.train
        self.held: Samples = train
        n = len(train)
        count = min(round(self.held_out * n), n - 1)
        if count > 0 and not self.share.novel:
            rows = torch.arange(count) * n // count
            rest = torch.ones(n, dtype=torch.bool).index_fill(0, rows, False)
            self.held = replace(train, index=train.index[rows])
            self.share = replace(self.share, train=replace(train, index=train.index[rest]))


def batch_norms(model: nn.Module) -> dict[str, Norm]:
    """The batch normalisation layers that have running statistics, by name."""
    layers = model.named_modules()
    return {n: m for n, m in layers if isinstance(m, Norm) and m.running_mean is not None}


@contextmanager
def before_norms(model: nn.Module, hook: Callable[[str, Norm, Tensor], None]) -> Iterator[None]:
    """Inside, `hook` gets each layer of `batch_norms` before its forward pass: its name, itself,
    and its inputs as (channels, values)."""

    def call(name: str, norm: nn.Module, inputs: tuple[Tensor]) -> None:
        assert isinstance(norm, Norm)
        hook(name, norm, inputs[0].detach().transpose(0, 1).flatten(1))

    norms = batch_norms(model)
    handles = [m.register_forward_pre_hook(partial(call, n)) for n, m in norms.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (channels,) of values (channels, m), m > 1."""
    variance, mean = torch.var_mean(values, 1)
    return mean, variance
