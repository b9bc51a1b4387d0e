"""FedTTA client (Ye et al., "UPFL: Unsupervised Personalized Federated Learning towards New
Clients", Algorithm 1): meta-learn a base model f(·; ψ) and a model g(·; φ) that adapts it.

One class for FedTTA (μ = 0, one step), FedTTA-Prox (μ > 0) and FedTTA++ (early stopping), and one
for FedTTA++ with a guard of ours: entropy also falls when a client's predictions collapse onto one
class.

Departs from the paper: the outer gradients of ψ and of φ are clipped, each network apart (without
it a client diverges in the first round); ‖g‖₂ is scaled by √(batch-size / n), so that a step on
any number n of samples is the step that was meta-learnt; normalisation layers use the statistics
of the inputs at hand, in training and in adaptation; the un-adapted model is no candidate of
FedTTA++, since it is often over-confident.

The authors' code departs further, by the settings in experiments/fedtta/table1-mnist.toml."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from clients.adaptation import INNER_LOSSES, KL_DIRECTIONS, Adapting, Step, divergence
from clients.arrays import Arrays
from clients.base import Client, Config, Metrics
from clients.models.adaptable import Adaptable, Adaptation
from clients.tent import batch_statistics, with_statistics
from partitions.datasets import Info
from partitions.seeds import drawing, seed_of


class FedTTAClient(Adapting, Client):
    """Meta-trains ψ with `lr` (η_outer) and φ with `adapt_lr` through one inner step of `inner_lr`.

    `mu` weighs the KL divergence from the server's predictions, Eq. (13). When scored it takes
    up to `max_steps` steps, stops once the entropy has not fallen below its least for `patience`
    steps and keeps the model of least entropy, of those whose predictions agree with the first
    step's on at least a share `min_agreement` of the samples. So no accuracy ends more than
    1 − `min_agreement` below the first step's. `clip_norm` 0 never clips; `first_order` drops the
    second derivatives with respect to ψ. Adapts in equal batches of at most `adapt_batch_size`
    samples, whose squared norms add up.

    `inner_loss`, `adapt_clip_norm` and the common `weight_decay` say what a step is, see
    `Adapting`; `adapt_momentum` is that of φ, `kl_direction` that of `divergence`."""

    offers = ("adaptation",)
    rates = ("lr", "inner_lr", "adapt_lr")

    def __init__(
        self,
        *args: Any,
        inner_lr: float = 0.5,
        adapt_lr: float = 0.01,
        adapt_momentum: float = 0.0,
        mu: float = 0.0,
        kl_direction: str = "student-teacher",
        clip_norm: float = 1.0,
        inner_loss: str = "whole",
        adapt_clip_norm: float = 0.0,
        first_order: bool = False,
        max_steps: int = 1,
        patience: int = 1,
        min_agreement: float = 0.0,
        adapt_batch_size: int = 2048,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        if not 0 <= min_agreement <= 1:
            raise ValueError(f"min-agreement is {min_agreement}; it must lie in [0, 1]")
        for key, value, least in (
            ("inner-lr", inner_lr, 0),
            ("adapt-lr", adapt_lr, 0),
            ("adapt-momentum", adapt_momentum, 0),
            ("mu", mu, 0),
            ("clip-norm", clip_norm, 0),
            ("adapt-clip-norm", adapt_clip_norm, 0),
            ("max-steps", max_steps, 1),
            ("patience", patience, 1),
            ("adapt-batch-size", adapt_batch_size, 1),
        ):
            if value < least:
                raise ValueError(f"{key} is {value}; it must be at least {least}")
        for key, chosen, known in (
            ("inner-loss", inner_loss, INNER_LOSSES),
            ("kl-direction", kl_direction, KL_DIRECTIONS),
        ):
            if chosen not in known:
                raise ValueError(f"unknown {key} {chosen!r}; known: {', '.join(known)}")
        if not isinstance(self.model, Adaptable):
            raise ValueError("the model has no adaptation network; wrap it by FedTTAClient.build")
        self.inner_lr, self.adapt_lr, self.adapt_momentum = inner_lr, adapt_lr, adapt_momentum
        self.mu, self.kl_direction = mu, kl_direction
        self.inner_loss, self.adapt_clip_norm = inner_loss, adapt_clip_norm
        self.clip_norm, self.first_order = clip_norm, first_order
        self.max_steps, self.patience, self.min_agreement = max_steps, patience, min_agreement
        self.adapt_batch_size = adapt_batch_size
        self.base, self.adaptation = self.model.base, self.model.adaptation
        self.server: nn.Module | None = None  # f(·; ψ_server), kept where μ > 0
        self._best: Step  # of the last adaptation

    @classmethod
    def build(
        cls, model: nn.Module, info: Info, *, adaptation_width: int = 32, seed: int = 0
    ) -> nn.Module:
        """The target network with an adaptation network of three hidden layers, which does not
        repeat the first's draws."""
        with drawing(seed_of(seed, "adaptation")):
            return Adaptable(model, Adaptation(info.num_classes, adaptation_width))

    # Training

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Meta-training from the server's two networks."""
        self.load(arrays)
        self.remember()
        loss = self.fit_locally(config)
        return self.arrays(), len(self.share.train), {"loss": loss}

    def remember(self) -> None:
        """Keep the base model as it stands for the proxy regularization."""
        self.server = batch_statistics(deepcopy(self.base)) if self.mu else None

    def tune(self, config: Config) -> None:
        """Learn from a novel client's few labels as a training client does: to be adapted."""
        self.remember()
        self.fit_locally(config, rows=self.rows(config, "shots"))

    def fit_locally(self, config: Config, **options: Any) -> float:
        """SGD on both networks, a learning rate each."""
        phi = {"lr": self.adapt_lr, "momentum": self.adapt_momentum}
        groups = [
            {"params": list(self.base.parameters())},
            {"params": list(self.adaptation.parameters())} | phi,
        ]
        return super().fit_locally(config, parameters=groups, adjust=self.clip, **options)

    def clip(self) -> None:
        """Clip the gradients of ψ and of φ, each network apart, to `clip_norm`."""
        if self.clip_norm:
            for network in (self.base, self.adaptation):
                nn.utils.clip_grad_norm_(network.parameters(), self.clip_norm, foreach=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE(f(X; ψ̃), Y) + μ KL(σ(f(X; ψ)) ‖ σ(f(X; ψ_server))), Eq. (13); the other way round
        by `kl_direction`."""
        z, adapted = self.adapt(x)
        loss = self.criterion(adapted, y)
        if self.server is not None:
            with torch.no_grad():
                reference = self.server(x)
            loss = loss + self.mu * divergence(z, reference, self.kl_direction)
        return loss

    # Adaptation without labels

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the model adapted to the inputs x (n, *shape)."""
        best: Step | None = None
        worse = 0  # steps in a row whose entropy is not below the least
        for step in self.steps(x, self.max_steps):
            if step.number == 0:
                self.stages, before = {"base": step.logits}, step.entropy
            elif best is None or (step.entropy < best.entropy and self.agrees(step)):
                self.stages.setdefault("one-step", step.logits)
                best, worse = step, 0
            else:
                worse += 1
            if worse == self.patience:
                break
        assert best is not None
        self._best = best
        self.adapted = {
            "adapt-steps": best.number,
            "entropy": best.entropy,
            "entropy-before": before,
        }
        return best.logits

    def agrees(self, step: Step) -> bool:
        """Whether the predictions are the first step's on enough of the samples."""
        same = step.logits.argmax(1) == self.stages["one-step"].argmax(1)
        return float(same.float().mean()) >= self.min_agreement

    def personal_model(self, x: Tensor) -> nn.Module:
        """f(·; ψ̃), its normalisation by the statistics of x."""
        model = deepcopy(self.base)
        model.load_state_dict(dict(self._best.parameters), strict=False)
        return with_statistics(model, x)


class FedTTAProxClient(FedTTAClient):
    """FedTTA-Prox: the base model's predictions stay close to the server's, Section 3.3.1."""

    def __init__(self, *args: Any, mu: float = 0.01, **options: Any) -> None:
        super().__init__(*args, mu=mu, **options)


class FedTTAPlusPlusClient(FedTTAProxClient):
    """FedTTA++: FedTTA-Prox that adapts until the entropy stops falling, Section 3.3.2."""

    def __init__(self, *args: Any, max_steps: int = 50, patience: int = 1, **options: Any) -> None:
        super().__init__(*args, max_steps=max_steps, patience=patience, **options)


class GuardedFedTTAPlusPlusClient(FedTTAPlusPlusClient):
    """FedTTA++ whose further steps must agree with the first one (ours)."""

    def __init__(self, *args: Any, min_agreement: float = 0.95, **options: Any) -> None:
        super().__init__(*args, min_agreement=min_agreement, **options)
