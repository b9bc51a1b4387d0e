"""ATP client (Bao, Wei, Wang and He, NeurIPS 2023): learnt rates of adaptation.

θ_l is a parameter tensor, or a running mean or variance of batch normalisation. Each θ_l has a rate
α_l, which may be negative. Adaptation to unlabeled inputs X: θ'_l = θ_l − α_l h_l.
- For a parameter h_l = ∇_{θ_l} mean H(p), with the entropy H of predictions p.
- For a statistic h_l = running − batch statistic, the mean over a layer's calls; the variance is
  unbiased, and θ'_l stays ≥ 0.
One forward pass of θ in evaluation mode gives all h_l. Training clients learn α on labeled samples:
g_l = ∂CE(θ'; X, y)/∂θ'_l, α_l ← α_l + η ⟨g_l, h_l⟩ / √d_l, where θ_l has d_l entries. This gradient
is exact, since h_l does not depend on α.

η = 0.1 is the value in the authors' scripts, for 40 held-out images of a client. With about six
images it can diverge; the validation of training clients then shows it
(docs/results/unseen-digits.md).

Departs from the authors' code: a layer with one value for a channel keeps its running statistics.
Agrees with that code to 1e-5: adaptation, both predictions, learnt α (tests/test_authors.py)."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from clients.core.arrays import VARIANCE, Arrays, prefixed
from clients.core.client import Config, Metrics
from clients.core.functional import functional_call
from clients.core.normalisation import entropy
from clients.core.protocol import StateUse
from clients.methods._batchwise import (
    STATISTICS,
    BatchwiseClient,
    Changes,
    HoldingOut,
    batch_norms,
    before_norms,
    check_own_statistics,
    moments,
)
from fedapps.common.settings import RATE, setting
from fedapps.common.tasks import CLASS_PROBABILITIES
from partitions.datasets.loading import Info

RATES = "adaptation_rates"  # α (L,), a buffer of the network, in the order of `adaptable`
LEARN_RATES = "learn-rates"  # key of a message's config: true in the second phase


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adaptable(model: nn.Module) -> dict[str, Tensor]:
    """θ_l by name: parameters that are not frozen, then running statistics."""
    theta = {name: p.detach() for name, p in trained_parameters(model).items()}
    buffers = dict(model.named_buffers())
    for layer in batch_norms(model):
        for statistic in STATISTICS:
            name = f"{layer}.{statistic}"
            theta[name] = buffers[name]
    return theta


class DifferentiableStatistics(TorchFunctionMode):
    """Within the context, gradients reach the running statistics of batch normalisation, whatever
    kind of layer calls torch's function."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function is F.batch_norm:
            return batch_norm(*args, **given)
        return function(*args, **given)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Torch's function of this name and signature; with running statistics it is
    (x − running mean) / √(running variance + ε), times weight, plus bias; x (n, C, …)."""
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    per_channel = (-1, *[1] * (input.ndim - 2))  # the shape that broadcasts over x
    mean = running_mean.view(per_channel)
    variance = running_var.view(per_channel)
    x = (input - mean) / (variance + eps).sqrt()
    if weight is not None:
        x = x * weight.view(per_channel)
    if bias is not None:
        x = x + bias.view(per_channel)
    return x


class ATPClient(BatchwiseClient, HoldingOut):
    """FedAvg's client in the first phase. In the second phase it learns α for a fixed network.

    It learns from the samples `held` in one pass over batches of `test_batch_size`, always from the
    received network. The server sends this network once, and the state keeps it. With `prediction`
    = "batch" the network that is adapted to a batch predicts it. With "online" it is the mean of
    the networks that are adapted to this batch and to the previous ones."""

    tasks = CLASS_PROBABILITIES
    adapts_by_gradients = True
    offers = ("adaptation-rates",)
    needs_state = StateUse.TRAINING
    rates = ("lr", "rates_lr")

    prediction = setting(
        "online", "adapt to each batch alone, or also to the previous ones", ("batch", "online")
    )
    rates_lr = setting(0.1, "η, learning rate of the adaptation rates", RATE)

    @classmethod
    def build(cls, model: nn.Module, info: Info, /) -> nn.Module:
        """The network with the buffer `adaptation_rates`, zeros. Raises ValueError if two layers
        hold the same statistics."""
        check_own_statistics("atp", model)
        model.register_buffer(RATES, torch.zeros(len(adaptable(model))))
        return model

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local training: of the network in the first phase, of α in the second phase."""
        if not config.get(LEARN_RATES):
            return super().train(arrays, config)
        network = {name: a for name, a in arrays.items() if name != RATES}
        self.state |= prefixed("personal", network)
        if not self.state:
            raise ValueError("the network, which the server sent once, is not in the state")
        self.load(arrays)
        x, y = self.held.to(self.device)[:]
        size = self.test_batch_size or len(x)
        total_loss = 0.0
        for x_batch, y_batch in zip(x.split(size), y.split(size), strict=True):
            total_loss += self.learn(x_batch, y_batch) * len(y_batch)
        reply = {RATES: self.alpha.cpu().numpy().copy()}
        return reply, len(y), {"loss": total_loss / len(y)}

    @property
    def alpha(self) -> Tensor:
        """The rates (L,) of the loaded network."""
        return self.model.get_buffer(RATES)

    def learn(self, x: Tensor, y: Tensor) -> float:
        """One step of α on a labeled batch; returns the loss of the adapted network."""
        h = self.directions(x)
        theta = {name: t.requires_grad_() for name, t in self.adapted_by(h).items()}
        with DifferentiableStatistics():
            loss = self.criterion(functional_call(self.model, theta, (x,)), y)
        g = torch.autograd.grad(loss, list(theta.values()), materialize_grads=True)
        steps = []
        for g_l, h_l in zip(g, h.values(), strict=True):
            steps.append((g_l * h_l).sum() / h_l.numel() ** 0.5)
        self.alpha.add_(torch.stack(steps), alpha=self.rates_lr)  # α ← α + η ⟨g, h⟩ / √d
        return float(loss.detach())

    def directions(self, x: Tensor) -> dict[str, Tensor]:
        """h_l by name, in the order of `adaptable`: means over the parts of x."""
        total: dict[str, Tensor] = {}
        for part in self.parts(x):
            weight = len(part) / len(x)
            for name, h_l in self._directions_of_part(part).items():
                term = weight * h_l
                total[name] = term + total[name] if name in total else term
        return total

    def _directions_of_part(self, x: Tensor) -> dict[str, Tensor]:
        theta = adaptable(self.model.eval())
        h = {name: torch.zeros_like(t) for name, t in theta.items()}
        calls: Counter[str] = Counter()

        def compare_statistics(layer: str, norm: nn.Module, values: Tensor) -> None:
            if values.shape[1] > 1:
                calls[layer] += 1
                for statistic, batch in zip(STATISTICS, moments(values), strict=True):
                    name = f"{layer}.{statistic}"
                    difference = theta[name] - batch
                    h[name] = h[name] + (difference - h[name]) / calls[layer]

        with before_norms(self.model, compare_statistics), torch.enable_grad():
            loss = entropy(self.model(x))
        parameters = trained_parameters(self.model)
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        return h | dict(zip(parameters, gradients, strict=True))

    def adapted_by(self, h: Changes) -> dict[str, Tensor]:
        """θ'_l = θ_l − α_l h_l by name; variances are clamped to at least 0."""
        adapted: dict[str, Tensor] = {}
        for (name, theta_l), alpha_l in zip(adaptable(self.model).items(), self.alpha, strict=True):
            adapted[name] = theta_l - alpha_l * h[name]
            if name.endswith(VARIANCE):
                adapted[name] = adapted[name].clamp(min=0)
        return adapted

    @property
    def online(self) -> bool:
        """Whether a prediction also uses the adaptations to previous batches."""
        return self.prediction == "online"

    supports_streaming = online

    def changes(self, x: Tensor) -> Changes:
        """θ' of the batch x; online the mean of θ' over the stream's batches, up to x."""
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
