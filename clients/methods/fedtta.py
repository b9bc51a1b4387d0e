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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from clients.core.copies import copy_of
from clients.core.evaluation import by_parts, predicted
from clients.core.functional import functional_call
from clients.core.layout import set_training
from clients.core.normalisation import NormCalls, batch_statistics, entropy, with_statistics
from clients.methods._divergence import KL_DIRECTION, divergence
from clients.models.adaptable import Adaptable, Adaptation
from fedapps.common.seeds import drawing, seed_of
from fedapps.common.settings import MOMENTUM, NONNEGATIVE, POSITIVE_INT, RATE, SHARE, WIDTH, setting
from fedapps.common.tasks import ALL_TASKS, CLASS_PROBABILITIES, ForTasks
from partitions.datasets.loading import Info

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class Step:
    """The model after `number` adaptation steps: ψ, its logits (n, C), ℓ_per and their entropy."""

    number: int
    parameters: Parameters
    logits: Tensor
    personalization: float
    entropy: float


class Adapting:
    """The inner loop, Section 3.2: adapts `base`, f(·; ψ), by steps of `inner_lr` on a loss ℓ_per.
    `adaptation`, g(·; φ), maps the logits of f to ℓ_per.

    In training the step is differentiable. In evaluation the steps are taken one by one.

    The loss ℓ_per of n samples depends on `inner_loss`: "whole" is √(batch_size / n)·‖g‖₂ over all
    samples; "batches" is the mean of ‖g(batch)‖₂ over batches of `batch_size`. Every step includes
    the `weight_decay`. In evaluation, `adapt_clip_norm` clips its gradient."""

    base: nn.Module
    adaptation: nn.Module
    inner_lr: float
    inner_loss: str
    weight_decay: float
    adapt_clip_norm: float
    first_order: bool
    batch_size: int
    adapt_batch_size: int

    parts: Callable[[Tensor], tuple[Tensor, ...]]  # Client's

    def adapt(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f(x; ψ) and f(x; ψ̃) for one batch x, differentiable, Eq. (3)–(6):
        ψ̃ = ψ − η_inner (∇_ψ ℓ_per + λψ) with the weight decay λ."""
        psi = self.psi()
        z = self.base(x)
        inner_psi = psi
        inner_z = z
        if self.first_order:  # no second derivatives: ∇_ψ ℓ_per is taken at a copy of ψ
            inner_psi = {name: nn.Parameter(p.detach()) for name, p in psi.items()}
            inner_z = functional_call(self.base, {**inner_psi, **self.buffers()}, (x,))
        # The gradient of −η_inner ℓ_per is the step itself, which saves two passes over ψ.
        descent = -self.inner_lr * self.personalization(inner_z)
        steps = torch.autograd.grad(
            descent, list(inner_psi.values()), create_graph=True, materialize_grads=True
        )
        decay = 1 - self.inner_lr * self.weight_decay
        psi_tilde: dict[str, Tensor] = {}
        for (name, p), step in zip(psi.items(), steps, strict=True):
            psi_tilde[name] = torch.add(step, p, alpha=decay)
        return z, functional_call(self.base, {**psi_tilde, **self.buffers()}, (x,))

    def personalization(self, z: Tensor) -> Tensor:
        """ℓ_per = ‖g(Z; φ)‖₂, Eq. (2), of one batch's logits; "whole": × √(batch-size / n)."""
        norm = torch.linalg.vector_norm(self.adaptation(z))
        if self.inner_loss == "whole":
            norm = norm * (self.batch_size / len(z)) ** 0.5
        return norm

    def psi(self) -> Parameters:
        """ψ: the base model's parameters that are not frozen, each under its first name."""
        return {name: p for name, p in self.base.named_parameters() if p.requires_grad}

    def buffers(self) -> Parameters:
        """Copies of the base model's buffers, so that running statistics count a batch once."""
        return {name: b.clone() for name, b in self.base.named_buffers()}

    def steps(self, x: Tensor, count: int, batch_size: int = 0) -> Iterator[Step]:
        """The model before and after each of `count` steps on all of x, Eq. (10)–(12):
        ψ ← ψ − η_inner (clipped ∇_ψ ℓ_per + λψ). `batch_size` > 0 replaces the client's."""
        batch_statistics(self.base, len(x) > 1)
        psi = self.psi()
        for number in range(count + 1):
            z, ell, gradient = self.evaluate_at(
                psi, x, differentiate=number < count, batch_size=batch_size
            )
            yield Step(number, psi, z, ell, float(entropy(z)))
            clip = 1.0  # the factor that makes the gradient's norm at most `adapt_clip_norm`
            if self.adapt_clip_norm:
                norm = float(nn.utils.get_total_norm(gradient.values()))
                clip = min(1.0, self.adapt_clip_norm / (norm + 1e-6))
            next_psi: dict[str, Tensor] = {}
            with torch.no_grad():
                for name, p in psi.items():
                    slope = clip * gradient[name] + self.weight_decay * p
                    next_psi[name] = p - self.inner_lr * slope
            psi = next_psi

    def evaluate_at(
        self, psi: Parameters, x: Tensor, *, differentiate: bool, batch_size: int = 0
    ) -> tuple[Tensor, float, Parameters]:
        """f(x; ψ), ℓ_per and, if `differentiate`, ∇_ψ ℓ_per; computed in passes over parts of x.

        "whole": ℓ_per = √(B/n) √s with s = Σ_j g_j², and ∇√s = Σ_passes ∇s_pass / (2√s).
        "batches": ℓ_per = s / M with s = Σ_b ‖g(batch b)‖₂ over the M batches."""
        psi = {name: p.detach().requires_grad_(differentiate) for name, p in psi.items()}
        size = batch_size or self.batch_size  # B
        logits: list[Tensor] = []
        s = 0.0
        slope_of_s = {name: torch.zeros_like(p) for name, p in psi.items()}
        for part in self._passes(x, size):
            with torch.set_grad_enabled(differentiate):
                z = functional_call(self.base, {**psi, **self.buffers()}, (part,))
                s_pass = self._term_of_s(self.adaptation(z), size)
            if differentiate:
                slopes = torch.autograd.grad(s_pass, list(psi.values()), materialize_grads=True)
                for name, slope in zip(psi, slopes, strict=True):
                    slope_of_s[name] += slope
            logits.append(z.detach())
            s += float(s_pass.detach())
        if self.inner_loss == "batches":
            factor = 1 / math.ceil(len(x) / size)  # 1 / M
            ell = factor * s
        else:
            scale = (size / len(x)) ** 0.5  # √(B/n)
            root = s**0.5
            factor = scale / (2 * root) if root else 0.0
            ell = scale * root
        gradient = {name: factor * slope for name, slope in slope_of_s.items()}
        return torch.cat(logits), ell, gradient

    def _passes(self, x: Tensor, size: int) -> Sequence[Tensor]:
        """x in parts of at most `adapt_batch_size` samples and about `pass_megabytes`.

        With "batches", a part consists of whole batches of `size` samples."""
        rows = min(self.adapt_batch_size, len(self.parts(x)[0]))
        if self.inner_loss == "whole" or rows == len(x):
            return x.tensor_split(math.ceil(len(x) / rows))
        batches_per_part = max(rows // size, 1)
        return x.split(batches_per_part * size)

    def _term_of_s(self, g: Tensor, size: int) -> Tensor:
        """The term of s from one pass, given g(Z; φ) (n, 1)."""
        if self.inner_loss == "whole":
            return g.square().sum()
        norms = [torch.linalg.vector_norm(batch) for batch in g.split(size)]
        return torch.stack(norms).sum()


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
    adapts_by_gradients = True
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
        self._entropy_before: float  # before its first step

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
        self.server = batch_statistics(copy_of(self.base)) if self.mu else None

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
        norm_calls = NormCalls(self.base)
        with norm_calls.counted():
            best = self.best_step(x)
        set_training(self.base, False)
        num_parts = len(self._passes(x, self.batch_size))
        if len(x) > 1 and not norm_calls.kept_by_statistics(num_parts):
            logits = by_parts(self.personal_model(x), self.parts(x))
            best = replace(best, logits=logits, entropy=float(entropy(logits)))
        self.adaptation_metrics = {"adapt-steps": best.number}
        if self.targets.task in CLASS_PROBABILITIES:
            self.adaptation_metrics["entropy"] = best.entropy
            self.adaptation_metrics["entropy-before"] = self._entropy_before
        return best.logits

    def best_step(self, x: Tensor) -> Step:
        """The step of the adaptation to x that `FedTTAClient` keeps."""
        best: Step | None = None
        worse = 0  # steps in a row without a new least entropy
        for step in self.steps(x, self.max_steps):
            if step.number == 0:  # the un-adapted model is no candidate
                self.intermediate_logits = {"base": step.logits}
                self._entropy_before = step.entropy
                continue
            if best is None:  # step 1, with which others must agree
                self.intermediate_logits["one-step"] = step.logits
                best = step
            elif step.entropy < best.entropy and self.agrees(step):
                best = step
                worse = 0
            else:
                worse += 1
            if worse == self.patience:
                break
        assert best is not None
        self._best = best
        return best

    def agrees(self, step: Step) -> bool:
        """Whether enough predictions equal the first step's."""
        first = predicted(self.intermediate_logits["one-step"], self.targets)
        same = predicted(step.logits, self.targets) == first
        return float(same.float().mean()) >= self.min_agreement

    def personal_model(self, x: Tensor) -> nn.Module:
        """f(·; ψ̃), normalised by the statistics of x."""
        model = copy_of(self.base)
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
