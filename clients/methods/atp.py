"""ATP client (Bao, Wei, Wang and He, NeurIPS 2023): learnt rates of adaptation.

Each parameter tensor θ_l and each running mean and variance of batch normalisation has a rate α_l
of any sign. Adaptation to unlabeled inputs X: θ'_l = θ_l − α_l h_l, with h_l = ∇_{θ_l} mean H(p)
for a parameter, and h_l = running − batch statistic (the variance unbiased); variances stay ≥ 0.
All h_l are of one forward pass of θ in evaluation mode. Training clients learn α on labeled
samples: g_l = ∂CE(θ'; X, y)/∂θ'_l, α_l ← α_l + η ⟨g_l, h_l⟩ / √d_l, d_l entries of θ_l. As h_l does
not depend on α, that is the exact gradient.

η = 0.1 is that of the authors' scripts, for 40 held-out images a client. With about six images
it can diverge, which the validation of training clients shows: docs/results/unseen-digits.md.

Departs from the authors' code: a layer with one value a channel keeps its running statistics.
Agrees with that code to 1e-5: adaptation, both predictions, learnt α (tests/test_authors.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clients.core.arrays import VARIANCE, Arrays, prefixed
from clients.core.client import Config, Metrics
from clients.core.normalisation import entropy
from clients.core.protocol import StateUse
from clients.methods._batchwise import (
    STATISTICS,
    BatchwiseClient,
    Changes,
    HoldingOut,
    Norm,
    batch_norms,
    before_norms,
    moments,
)
from fedapps.common.settings import RATE, setting
from partitions.datasets.loading import Info

RATES = "adaptation_rates"  # α (L,), a buffer of the network, in the order of `adaptable`
LEARN_RATES = "learn-rates"  # key of a message's config: the second phase has begun


def adaptable(model: nn.Module) -> dict[str, Tensor]:
    """What has a rate, by name: parameters that are not frozen, then running statistics."""
    buffers = dict(model.named_buffers())
    statistics = {f"{n}.{s}": buffers[f"{n}.{s}"] for n in batch_norms(model) for s in STATISTICS}
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad} | statistics


@contextmanager
def differentiable_norms(model: nn.Module) -> Iterator[None]:
    """Inside, gradients reach the running statistics by which batch normalisation normalises."""
    norms = batch_norms(model).values()
    for norm in norms:
        norm.forward = partial(normalised, norm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def normalised(norm: Norm, x: Tensor) -> Tensor:
    """(x − running mean) / √(running variance + ε), times weight, plus bias."""
    mean, variance, weight, bias = (
        t if t is None else t.view(-1, *[1] * (x.ndim - 2))
        for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    assert mean is not None and variance is not None
    x = (x - mean) / (variance + norm.eps).sqrt()
    return x if weight is None or bias is None else x * weight + bias


class ATPClient(BatchwiseClient, HoldingOut):
    """FedAvg's client in the first phase; in the second one it learns α, with the network fixed.

    It learns from `held`, in one pass over batches of `test_batch_size`, each from the network as
    it was sent. The state keeps that network, which is sent once. `prediction` = "batch" predicts
    a batch by the network that is adapted to it, "online" by the mean of the networks that are
    adapted to it and to the batches before it."""

    offers = ("adaptation-rates",)
    needs_state = StateUse.TRAINING
    rates = ("lr", "rates_lr")

    prediction = setting("online", "with adaptation to a batch, or to those before it as well",
                         ("batch", "online"))  # fmt: skip
    rates_lr = setting(0.1, "η, learning rate of the adaptation rates", RATE)

    @classmethod
    def build(cls, model: nn.Module, info: Info, /) -> nn.Module:
        """The network with the buffer `adaptation_rates`, zeros."""
        model.register_buffer(RATES, torch.zeros(len(adaptable(model))))
        return model

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local training of the network, or in the second phase of α alone."""
        if not config.get(LEARN_RATES):
            return super().train(arrays, config)
        network = {name: a for name, a in arrays.items() if name != RATES}
        self.state |= prefixed("personal", network)
        if not self.state:
            raise ValueError("the network, which the server sent once, is not in the state")
        self.load(arrays)
        x, y = self.held.to(self.device)[:]
        size = self.test_batch_size or len(x)
        losses = [
            self.learn(*batch) * len(batch[1])
            for batch in zip(x.split(size), y.split(size), strict=True)
        ]
        reply = {RATES: self.alpha.cpu().numpy().copy()}
        return reply, len(y), {"loss": sum(losses) / len(y)}

    @property
    def alpha(self) -> Tensor:
        """The rates (L,) of the loaded network."""
        return self.model.get_buffer(RATES)

    def learn(self, x: Tensor, y: Tensor) -> float:
        """One step of α on a labeled batch; returns the loss of the adapted network."""
        h = self.directions(x)
        theta = {name: t.requires_grad_() for name, t in self.adapted_by(h).items()}
        with differentiable_norms(self.model):
            loss = self.criterion(functional_call(self.model, theta, (x,)), y)
        g = torch.autograd.grad(loss, list(theta.values()), materialize_grads=True)
        steps = [(a * b).sum() / b.numel() ** 0.5 for a, b in zip(g, h.values(), strict=True)]
        self.alpha.add_(torch.stack(steps), alpha=self.rates_lr)
        return float(loss.detach())

    def directions(self, x: Tensor) -> dict[str, Tensor]:
        """h_l by name, in the order of `adaptable`: means over the parts of x."""
        total: dict[str, Tensor] = {}
        for part in self.parts(x):
            share = len(part) / len(x)
            h = self._directions(part)
            total = {n: share * t + total[n] if total else share * t for n, t in h.items()}
        return total

    def _directions(self, x: Tensor) -> dict[str, Tensor]:
        theta = adaptable(self.model.eval())
        h = {name: torch.zeros_like(t) for name, t in theta.items()}

        def compare(name: str, norm: nn.Module, values: Tensor) -> None:
            if values.shape[1] > 1:
                for statistic, batch in zip(STATISTICS, moments(values), strict=True):
                    h[f"{name}.{statistic}"] = theta[f"{name}.{statistic}"] - batch

        with before_norms(self.model, compare), torch.enable_grad():
            loss = entropy(self.model(x))
        parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        slopes = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        return h | dict(zip(parameters, slopes, strict=True))

    def adapted_by(self, h: Changes) -> dict[str, Tensor]:
        """θ' from h."""
        theta = adaptable(self.model)
        moved = {n: t - a * h[n] for (n, t), a in zip(theta.items(), self.alpha, strict=True)}
        return {n: t.clamp(min=0) if n.endswith(VARIANCE) else t for n, t in moved.items()}

    @property
    def online(self) -> bool:
        """Whether a prediction uses the adaptations to the batches before."""
        return self.prediction == "online"

    supports_streaming = online

    def changes(self, x: Tensor) -> Changes:
        """θ' of the batch x; online the mean over the stream's batches, x in batches included."""
        if not self.online:
            return self.adapted_by(self.directions(x))
        for batch in x.split(self.prediction_batch or len(x)):
            mean = self.mean_so_far(self.adapted_by(self.directions(batch)))
        return mean

    def personal_model(self, x: Tensor) -> nn.Module:
        """The adapted network, without its rates."""
        model = super().personal_model(x)
        delattr(model, RATES)
        return model
