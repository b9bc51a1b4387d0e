"""Clients that adapt FedAvg's model to one batch of unlabeled inputs after another, when scored.

In a served model, all inputs of an update are one batch. Statistics and gradients of a large batch
are means over parts of `pass-megabytes`."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clients.core.client import Client
from clients.core.evaluation import by_parts
from clients.core.functional import functional_call
from clients.core.layer_inputs import before_calls
from fedapps.common.settings import COUNT, setting
from partitions.shares import Samples, labeled_rows

Changes = dict[str, Tensor]  # the tensors that adaptation changes, by name
Norm = nn.modules.batchnorm._BatchNorm
Moments = Callable[[Tensor], tuple[Tensor, Tensor]]
STATISTICS = ("running_mean", "running_var")
CHANCE = 1e-6  # that all samples of a class are held out: below it the labels' order is the cause
VALUES_AT_ONCE = 4096  # of a channel; with 64 channels they fit into a core's cache


class BatchwiseClient(Client):
    """FedAvg's client that, when scored, adapts to each batch of the inputs, in their order.

    A batch has `test_batch_size` inputs. A novel client's `novel_batch` > 0 replaces this size."""

    batchwise = True

    test_batch_size = setting(
        20, "batch size of adaptation and prediction; 0: all inputs", COUNT, evaluation=True
    )

    def changes(self, x: Tensor) -> Changes:
        """The tensors that adaptation to x, the next batch of the stream, changes."""
        raise NotImplementedError

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the next batch, by the network that is adapted to it."""
        self._changes = self.changes(x)
        adapted = partial(functional_call, self.model, self._changes)
        return by_parts(adapted, self.parts(x))

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C), each batch by the network that is adapted to it."""
        return torch.cat([self.update(batch) for batch in self.test_batches(x)])

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network that is adapted to the last batch."""
        model = super().personal_model(x)
        model.load_state_dict(self._changes, strict=False)
        return model

    def test_batches(self, x: Tensor) -> Iterator[Tensor]:
        """x in batches; the last one may be smaller. Each starts a new stream, unless `online`."""
        size = self.prediction_batch or max(len(x), 1)
        for number, batch in enumerate(x.split(size)):
            if number == 0 or not self.online:
                self.stream = {}
            yield batch

    @property
    def online(self) -> bool:
        """Whether the batches of a prediction are one stream."""
        return self.share.novel and self.novel_stream

    @property
    def prediction_batch(self) -> int:
        """The number of inputs in a batch; 0: all inputs."""
        if self.share.novel and self.novel_batch:
            return self.novel_batch
        return self.test_batch_size


class HoldingOut(Client):
    """A client that holds out some training samples: the network is not trained on `held`.

    These are evenly spaced among the training samples. A network from another run may have been
    trained on them. With too few samples or `held_out` = 0, `held` are the training samples.

    Raises ValueError where labels repeat in an order by which no sample of a class is left."""

    held_out = setting(
        0.2, "share of the training samples held out from local training", "[0, 1)", neutral=0.0
    )

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        train = self.share.train
        self.held: Samples = train
        n = len(train)
        count = self.num_held_out(n, self.held_out)
        if count and not self.share.novel:
            rows = torch.arange(count) * n // count
            rest = torch.ones(n, dtype=torch.bool).index_fill(0, rows, False)
            check_classes_left(train.y[train.index], rest)
            self.held = replace(train, index=train.index[rows])
            self.share = replace(self.share, train=replace(train, index=train.index[rest]))

    @staticmethod
    def num_held_out(n: int, held_out: float) -> int:
        """How many of n training samples a client holds out."""
        return max(min(round(held_out * n), n - 1), 0)


def check_classes_left(y: Tensor, rest: Tensor) -> None:
    """Raise ValueError if all samples of a class are held out, and not by chance: of labels y (n,)
    those in `rest` (n,) stay. A dataset of the user's gives labels only with their inputs, so `y`
    has none of them."""
    if y.ndim > 1 or y.is_floating_point() or y.is_meta:
        return
    known = labeled_rows(y)
    before = y[known].bincount()
    after = y[known & rest].bincount(minlength=len(before))
    held_share = 1 - rest.double().mean()
    improbable = held_share**before < CHANCE
    lost = (improbable & (after == 0)).nonzero().flatten().tolist()
    if lost:
        raise ValueError(
            f"held-out takes every training sample of class {lost[0]}, {int(before[lost[0]])} of "
            f"{len(y)}, since the labels repeat in a fixed order; shuffle the training samples, or "
            "take another held-out"
        )


def batch_norms(model: nn.Module) -> dict[str, Norm]:
    """The batch normalisation layers that have running statistics, by name."""
    norms: dict[str, Norm] = {}
    for name, module in model.named_modules():
        if isinstance(module, Norm) and module.running_mean is not None:
            norms[name] = module
    return norms


def check_own_statistics(method: str, model: nn.Module) -> None:
    """Raise ValueError if two layers of `batch_norms` hold the same running statistics."""
    holders: dict[int, str] = {}
    for name, norm in batch_norms(model).items():
        first = holders.setdefault(id(norm.running_mean), name)
        if first != name:
            raise ValueError(
                f"{method} adapts the running statistics of each layer, and {first!r} and {name!r} "
                "hold the same ones; give each layer its own"
            )


@contextmanager
def before_norms(model: nn.Module, hook: Callable[[str, Norm, Tensor], None]) -> Iterator[None]:
    """Within the context, call `hook` before the forward pass of each layer of `batch_norms`.

    It gets the layer's name, the layer, and the layer's inputs as (channels, values)."""

    def call(name: str, norm: Norm, x: Tensor) -> None:
        hook(name, norm, x.detach().transpose(0, 1).flatten(1))

    handles = []
    for name, norm in batch_norms(model).items():
        handles.append(before_calls(norm, partial(call, name, norm)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (channels,) of values (channels, m), m > 1."""
    variance, mean = torch.var_mean(values, 1)
    return mean, variance


def pooled_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """`moments` up to rounding, pooled over parts of the values: up to 13 times faster on a CPU
    where channels are last in memory, and 4 times where they are first.

    Σ (x − x̄)² = Σ_k (Σ_{x in k} (x − x̄_k)² + m_k (x̄_k − x̄)²) over parts k of m_k values."""
    m = values.shape[1]
    parts = values.split(VALUES_AT_ONCE, 1)
    means = []
    squares = []
    for part in parts:
        mean = part.mean(1)
        means.append(mean)
        squares.append((part - mean[:, None]).square_().sum(1))
    counts = torch.tensor([part.shape[1] for part in parts]).to(values)[:, None]
    mean_by_part = torch.stack(means)
    mean = (counts * mean_by_part).sum(0) / m
    between = counts * (mean_by_part - mean).square()
    return mean, (torch.stack(squares) + between).sum(0) / (m - 1)


def mixed_statistics(
    model: nn.Module,
    previous: Mapping[str, Tensor],
    x: Tensor,
    rho: float,
    moments_of: Moments = moments,
) -> tuple[Changes, Tensor]:
    """ρ · previous + (1 − ρ) · the statistics of the batch x, by name, and the logits (n, C) that
    the network in evaluation mode has with them: layer by layer in one forward pass.

    A layer with one value for a channel, which has no variance, keeps `previous`. A layer that is
    called several times has the mean over its calls; the logits then take a second pass.
    `moments_of` gives mean and unbiased variance (channels,) of values (channels, m)."""
    mixed: Changes = {}
    for layer in batch_norms(model):
        for statistic in STATISTICS:
            name = f"{layer}.{statistic}"
            mixed[name] = previous[name].clone()
    calls: Counter[str] = Counter()

    def mix(layer: str, norm: nn.Module, values: Tensor) -> None:
        if values.shape[1] > 1:
            calls[layer] += 1
            for statistic, batch in zip(STATISTICS, moments_of(values), strict=True):
                name = f"{layer}.{statistic}"
                new = rho * previous[name] + (1 - rho) * batch
                # In place: the layer then normalises its inputs by the mixed statistics.
                mixed[name].lerp_(new.to(mixed[name]), 1 / calls[layer])

    with torch.no_grad(), before_norms(model, mix):
        logits = functional_call(model, mixed, (x,))
    if max(calls.values(), default=0) > 1:
        with torch.no_grad():
            logits = functional_call(model, mixed, (x,))
    return mixed, logits
