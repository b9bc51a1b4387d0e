"""FLowDUP client (Zakerinia, Scott and Lampert, Federated Learning with Unlabeled Clients:
Personalization Can Happen in Low Dimensions, ICML 2026, arXiv 2505.15579).

The client's network has the weights θ = θ₀ + P v, v = h(X; ψ_h) ∈ ℝᵏ, from its inputs X alone.
ψ = (ψ_h, ψ_r) is learnt, by L + λ Ω: L is the cross entropy, with v from one half of a mini-batch
and the loss on the other; clients without labels train on λ Ω alone. The seed decides θ₀ and P.

No complete text was available, so these are ours: Ω from the Gaussian bound, all its terms on each
client; h is the encoder `mean`, whose last layer is h₂; P has one entry ±1/√n in a row and n of
them in each column. Its columns are orthonormal, and it takes the memory of θ at any k, where a
dense P takes k times that. Running statistics of batch normalisation are not generated but
averaged; clients without labels leave theirs as they are. GroupNorm needs none.

It learns more slowly than FedAvg: P Pᵀ keeps k of the d dimensions of a gradient, and half of a
mini-batch is for v. A smaller k makes messages smaller and learns more slowly still:
docs/results/unseen-digits.md."""

from typing import Any

import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from clients.core.copies import copy_of
from clients.core.evaluation import by_parts
from clients.core.functional import functional_call
from clients.models.encoders import MeanSets
from fedapps.common.seeds import seed_of
from fedapps.common.settings import NONNEGATIVE, POSITIVE_INT, setting
from fedapps.common.tasks import ALL_TASKS
from partitions.datasets.loading import Info


class LowDimensional(nn.Module):
    """The target network, whose trained parameters are buffers with θ₀ that are in no message, P by
    the column and the entry of each row, the encoder h and ψ_r."""

    column: Tensor
    entry: Tensor

    def __init__(self, target: nn.Module, shape: tuple[int, ...], k: int, seed: int) -> None:
        super().__init__()
        named = {n: p for n, p in target.named_parameters() if p.requires_grad}
        self.sizes = {name: p.numel() for name, p in named.items()}
        k = min(k, sum(self.sizes.values()))
        self.encoder = MeanSets(target, shape, k)  # h, with ψ_h
        self.center = nn.Parameter(torch.zeros(k))  # ψ_r
        # Every name of a trained parameter → its first name; tied parameters have several names.
        first_names = {p: name for name, p in named.items()}
        self.source: dict[str, str] = {}
        for name, p in target.named_parameters(remove_duplicate=False):
            if p in first_names:
                self.source[name] = first_names[p]
        for name in self.source:
            owner, leaf = _place(target, name)
            delattr(owner, leaf)
            theta_0 = named[self.source[name]].detach()
            owner.register_buffer(leaf, theta_0, persistent=False)
        self.target = target
        generator = torch.Generator().manual_seed(seed_of(seed, "projection"))
        column = torch.randperm(sum(self.sizes.values()), generator=generator) % k
        sign = 2.0 * torch.randint(2, column.shape, generator=generator) - 1
        self.register_buffer("column", column, persistent=False)
        entry = sign / column.bincount(minlength=k)[column].sqrt()
        self.register_buffer("entry", entry, persistent=False)

    def generated(self, v: Tensor) -> dict[str, Tensor]:
        """θ₀ + P v for v (k,), by name; tied parameters under all their names."""
        p_v = (self.entry * v[self.column]).split(list(self.sizes.values()))
        theta_0 = dict(self.target.named_buffers())
        theta: dict[str, Tensor] = {}
        for name, step in zip(self.sizes, p_v, strict=True):
            start = theta_0[name]
            theta[name] = start + step.view_as(start).to(start.dtype)
        return {name: theta[first_name] for name, first_name in self.source.items()}

    def apply_with(self, theta: dict[str, Tensor], x: Tensor) -> Tensor:
        """The logits (n, C) of the target network with the weights θ."""
        return functional_call(self.target, theta, (x,))

    def forward(self, x: Tensor) -> Tensor:
        """The logits (n, C) of the network that x itself generates."""
        return self.apply_with(self.generated(self.encoder(x)), x)


def _place(network: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor, and its name there."""
    parent, _, leaf = name.rpartition(".")
    return network.get_submodule(parent), leaf


class FLowDUPClient(Client):
    """λ is `penalty`, k is `dimension`. Ω_i = ‖v_i − ψ_r‖²/(2 α_θ) + ‖ψ_h‖²/(2 α_h) +
    ‖ψ_r‖²/(2 α_r); the α are `alpha_theta`, `alpha_h` and `alpha_r`."""

    tasks = ALL_TASKS
    supports_streaming = True
    model: LowDimensional  # by `build`

    dimension = setting(
        10_000, "k, entries of v; at most the network's trained weights", POSITIVE_INT
    )
    penalty = setting(0.0001, "λ, weight of Ω", NONNEGATIVE)
    alpha_theta = setting(1.0, "α_θ, variance of the clients' v around ψ_r", "(0, 1000000]")
    alpha_h = setting(10.0, "α_h, variance of the encoder's weights", "(0, 1000000]")
    alpha_r = setting(10.0, "α_r, variance of the common part ψ_r of v", "(0, 1000000]")

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.unlabeled = self.share.unlabeled

    @classmethod
    def build(cls, model: nn.Module, info: Info, *, dimension: int, seed: int) -> nn.Module:
        """The encoder, and the target network with fixed θ₀ and P."""
        return LowDimensional(model, tuple(info.shape), dimension, seed)

    def regularizer(self, v: Tensor) -> Tensor:
        """Ω_i for the client's v (k,)."""
        center = self.model.center
        h = sum(p.square().sum() for p in self.model.encoder.parameters())
        omega: Tensor = (
            (v - center).square().sum() / (2 * self.alpha_theta)
            + h / (2 * self.alpha_h)
            + center.square().sum() / (2 * self.alpha_r)
        )
        return omega

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE + λ Ω; for a client without labels only λ Ω.

        The first half of the mini-batch gives v, the second half CE. One or two samples serve for
        both, since batch normalisation needs two."""
        half = len(x) // 2 if len(x) > 2 else 0
        v = self.model.encoder(x[:half] if half else x)
        loss = self.penalty * self.regularizer(v)
        if self.unlabeled:
            return loss
        logits = self.model.apply_with(self.model.generated(v), x[half:])
        return loss + self.criterion(logits, y[half:])

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Local steps on ψ. A client without labels reports no loss of predictions."""
        reply, n, metrics = super().train(arrays, config)
        return reply, n, {} if self.unlabeled else metrics

    def v(self, x: Tensor) -> Tensor:
        """v (k,) of the inputs x: independent of their order, and a mean over the parts of x."""
        terms = [self.model.encoder(part) * (len(part) / len(x)) for part in self.parts(x)]
        return torch.stack(terms).sum(0)

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the network that x generates."""
        self.stream = {}
        return self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the network that the mean v of all inputs of the stream generates."""
        with torch.no_grad():
            self.mean_so_far({"v": self.v(x)}, len(x))
        theta = self._theta()
        return by_parts(lambda part: self.model.apply_with(theta, part), self.parts(x))

    def personal_model(self, x: Tensor) -> nn.Module:
        """The target network with the last generated weights."""
        network = copy_of(self.model.target).eval()
        parameters: dict[str, nn.Parameter] = {}
        for name, tensor in self._theta().items():
            first = self.model.source[name]
            parameter = parameters.setdefault(first, nn.Parameter(tensor))
            owner, leaf = _place(network, name)
            delattr(owner, leaf)
            owner.register_parameter(leaf, parameter)
        return network

    def _theta(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return self.model.generated(self.stream["v"])
