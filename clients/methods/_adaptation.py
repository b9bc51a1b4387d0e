"""The inner loop of FedTTA (Ye et al., UPFL, Section 3.2).

A model g(·; φ) maps the logits of a base model f(·; ψ) to a loss ℓ_per, by which ψ is adapted. In
training the step is differentiable. In evaluation the steps are taken one by one."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clients.core.normalisation import batch_statistics, class_logits, entropy
from fedapps.common.settings import setting

Parameters = Mapping[str, Tensor]
KL_DIRECTION = setting(
    "student-teacher",
    "KL(client ‖ server), as the paper prints it, or the reverse",
    ("student-teacher", "teacher-student"),
)


def kl_categorical(p: Tensor, q: Tensor) -> Tensor:
    """Mean over the batch of KL(σ(p) ‖ σ(q)), from logits (n, C), or one output for two classes."""
    log_p = class_logits(p).log_softmax(1)
    log_q = class_logits(q).log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


def divergence(student: Tensor, teacher: Tensor, direction: str) -> Tensor:
    """KL(student ‖ teacher) as printed, or KL(teacher ‖ student) as in the authors' code.

    Both arguments are logits (n, C)."""
    if direction == "student-teacher":
        return kl_categorical(student, teacher)
    return kl_categorical(teacher, student)


@dataclass(frozen=True)
class Step:
    """The model after `number` adaptation steps: ψ, its logits (n, C), ℓ_per and their entropy."""

    number: int
    parameters: Parameters
    logits: Tensor
    personalization: float
    entropy: float


class Adapting:
    """Adapts `base` by `adaptation` with steps of `inner_lr`; see FedTTAClient.

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
