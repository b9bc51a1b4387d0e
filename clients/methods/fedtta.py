"""FedTTA client (Ye et al., "UPFL: Unsupervised Personalized Federated Learning towards New
Clients", Algorithm 1): meta-learn a base model f(·; ψ) and a model g(·; φ) that adapts it.

One class for FedTTA (μ = 0, one step), FedTTA-Prox (μ > 0) and FedTTA++ (early stopping). A further
one guards FedTTA++ (ours): entropy also falls when predictions collapse onto one class.

Departs from the paper: the outer gradients of ψ and of φ are clipped separately (without it clients
diverge in the first round); ‖g‖₂ is scaled by √(batch-size / n), so a step on n samples is the step
that was meta-learnt; normalisation layers use the statistics of the present inputs; the un-adapted
model is no candidate of FedTTA++, since it is often over-confident.

The authors' code departs further, by the settings in experiments/fedtta/table1-mnist.toml. As it
was released, its FedTTA++ always keeps the un-adapted model (docs/results/fedtta.md)."""

from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from clients.core.normalisation import batch_statistics, with_statistics
from clients.core.outputs import predicted
from clients.methods._adaptation import KL_DIRECTION, Adapting, Step, divergence
from clients.models.adaptable import Adaptable, Adaptation
from fedapps.common.seeds import drawing, seed_of
from fedapps.common.settings import MOMENTUM, NONNEGATIVE, POSITIVE_INT, RATE, SHARE, WIDTH, setting
from fedapps.common.tasks import ALL_TASKS, CLASS_PROBABILITIES, ForTasks
from partitions.datasets.loading import Info


class FedTTAClient(Adapting, Client):
    """Meta-trains ψ with `lr` (η_outer) and φ with `adapt_lr` through one inner step of `inner_lr`.

    When scored it takes at most `max_steps` steps and stops after `patience` steps without a new
    least entropy. It keeps the model of least entropy among those whose predictions agree with the
    first step's on at least a share `min_agreement` of the samples: so no accuracy falls more than
    1 − `min_agreement` below the first step's. `Adapting` says what a step is."""

    tasks: tuple[str, ...] = ALL_TASKS
    # They compare probabilities, or choose a step by their entropy.
    settings_for_tasks: ClassVar = {
        "mu": ForTasks(CLASS_PROBABILITIES, 0.0),
        "max_steps": ForTasks(CLASS_PROBABILITIES, 1),
    }
    offers = ("adaptation",)
    rates = ("lr", "inner_lr", "adapt_lr")
    model: Adaptable  # by `build`

    inner_lr = setting(0.5, "η_inner, learning rate of the adaptation step", RATE)
    adapt_lr = setting(0.01, "η_adapt, learning rate of the adaptation model", RATE)
    adapt_momentum = setting(
        0.0, "momentum of the adaptation model; starts at zero in each round", MOMENTUM
    )
    mu = setting(0.0, "weight of the KL divergence from the server's predictions", NONNEGATIVE)
    kl_direction = KL_DIRECTION
    clip_norm = setting(5.0, "clip each network's outer gradient to this norm; 0: off", NONNEGATIVE)
    inner_loss = setting(
        "whole",
        "ℓ_per: √(batch-size / n)·‖g‖ of all, or mean of batches",
        ("whole", "batches"),
    )
    adapt_clip_norm = setting(
        0.0, "clip the gradient of an adaptation step to this norm; 0: off", NONNEGATIVE
    )
    first_order = setting(False, "drop second derivatives with respect to the base model")
    max_steps = setting(1, "most adaptation steps when scored", POSITIVE_INT)
    patience = setting(
        1,
        "stop after this many steps in a row without a new least entropy",
        POSITIVE_INT,
        beside="max-steps!=1",
    )
    min_agreement = setting(
        0.0,
        "share of predictions that must agree with the first step's; 0: off",
        SHARE,
        beside="max-steps!=1",
    )
    adapt_batch_size = setting(2048, "samples of one adapting pass, to save memory", POSITIVE_INT)
    adaptation_width = setting(32, "units of the adaptation model's three hidden layers", WIDTH)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.base = self.model.base
        self.adaptation = self.model.adaptation
        self.server: nn.Module | None = None  # f(·; ψ_server), kept where μ > 0
        self._best: Step  # of the last adaptation

    @classmethod
    def build(cls, model: nn.Module, info: Info, *, adaptation_width: int, seed: int) -> nn.Module:
        """The target network with an adaptation network, initialised by a different seed."""
        with drawing(seed_of(seed, "adaptation")):
            return Adaptable(model, Adaptation(info.num_outputs, adaptation_width))

    # Training

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Meta-training from the server's two networks."""
        self.load(arrays)
        self.keep_server()
        loss = self.fit_locally(config)
        return self.arrays(), len(self.share.train), {"loss": loss}

    def keep_server(self) -> None:
        """Copy the base model for the proxy regularization."""
        self.server = batch_statistics(deepcopy(self.base)) if self.mu else None

    def tune(self, config: Config) -> None:
        """Meta-train on a novel client's few labels, as a training client does."""
        self.keep_server()
        self.fit_locally(config, rows=self.rows(config, "shots"))

    def fit_locally(self, config: Config, **options: Any) -> float:
        """SGD on both networks, each with its learning rate and its clipping by `clip_norm`."""
        phi = {"lr": self.adapt_lr, "momentum": self.adapt_momentum}
        groups = [
            {"params": list(self.base.parameters())},
            {"params": list(self.adaptation.parameters())} | phi,
        ]
        own = {"parameters": groups, "adjust": self.clip, "clip_norm": 0.0}
        return super().fit_locally(config, **own | options)

    def clip(self) -> None:
        """Clip the gradients of ψ and of φ separately to `clip_norm`."""
        if self.clip_norm:
            for network in (self.base, self.adaptation):
                nn.utils.clip_grad_norm_(network.parameters(), self.clip_norm, foreach=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE(f(X; ψ̃), Y) + μ KL(σ(f(X; ψ)) ‖ σ(f(X; ψ_server))), Eq. (13), or the reverse KL."""
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
        worse = 0  # steps in a row without a new least entropy
        for step in self.steps(x, self.max_steps):
            if step.number == 0:
                self.intermediate_logits = {"base": step.logits}
                entropy_before = step.entropy
            elif best is None or (step.entropy < best.entropy and self.agrees(step)):
                self.intermediate_logits.setdefault("one-step", step.logits)
                best = step
                worse = 0
            else:
                worse += 1
            if worse == self.patience:
                break
        assert best is not None
        self._best = best
        self.adaptation_metrics = {"adapt-steps": best.number}
        if self.targets.task in CLASS_PROBABILITIES:
            self.adaptation_metrics["entropy"] = best.entropy
            self.adaptation_metrics["entropy-before"] = entropy_before
        return best.logits

    def agrees(self, step: Step) -> bool:
        """Whether enough predictions equal the first step's."""
        first = predicted(self.intermediate_logits["one-step"], self.targets)
        same = predicted(step.logits, self.targets) == first
        return float(same.float().mean()) >= self.min_agreement

    def personal_model(self, x: Tensor) -> nn.Module:
        """f(·; ψ̃), normalised by the statistics of x."""
        model = deepcopy(self.base)
        model.load_state_dict(dict(self._best.parameters), strict=False)
        return with_statistics(model, *self.parts(x))


class FedTTAProxClient(FedTTAClient):
    """FedTTA-Prox: the base model's predictions stay close to the server's, Section 3.3.1."""

    tasks = CLASS_PROBABILITIES
    mu = 0.01


class FedTTAPlusPlusClient(FedTTAProxClient):
    """FedTTA++: FedTTA-Prox that adapts until the entropy stops falling, Section 3.3.2."""

    max_steps = 50


class GuardedFedTTAPlusPlusClient(FedTTAPlusPlusClient):
    """FedTTA++ whose further steps must agree with the first one (ours)."""

    min_agreement = 0.95
