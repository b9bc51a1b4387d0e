"""The inner loop of FedTTA (Ye et al., UPFL, Section 3.2): a model g(·; φ) of its logits adapts a
base model f(·; ψ), differentiably in training, and step by step in evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clients.core.normalisation import batch_statistics, entropy
from fedapps.common.settings import setting

Parameters = Mapping[str, Tensor]
KL_DIRECTION = setting(
    "student-teacher",
    "KL(client ‖ server), as printed, or the reverse",
    ("student-teacher", "teacher-student"),
)


def kl_categorical(p: Tensor, q: Tensor) -> Tensor:
    """Mean over the batch of KL(σ(p) ‖ σ(q)), from logits (n, C)."""
    log_p, log_q = p.log_softmax(1), q.log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


def divergence(student: Tensor, teacher: Tensor, direction: str) -> Tensor:
    """KL(student ‖ teacher), as the paper prints it, or KL(teacher ‖ student), as in its authors'
    code; from logits (n, C)."""
    return (
        kl_categorical(student, teacher)
        if direction == "student-teacher"
        else kl_categorical(teacher, student)
    )


@dataclass(frozen=True)
class Step:
    """The model after `number` adaptation steps: ψ, its logits (n, C), ℓ_per and entropy."""

    number: int
    parameters: Parameters
    logits: Tensor
    personalization: float
    entropy: float


class Adapting:
    """Adapts `base` by `adaptation` with steps of `inner_lr`; see FedTTAClient.

    With `inner_loss` = "whole" the loss of n samples is √(batch_size / n)·‖g‖₂ over all of them,
    with "batches" the mean of ‖g(batch)‖₂ over batches of `batch_size`. Every step has the
    `weight_decay`; `adapt_clip_norm` clips its gradient, except in training."""

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
        source, inner = psi, z
        if self.first_order:
            source = {name: nn.Parameter(p.detach()) for name, p in psi.items()}
            inner = functional_call(self.base, {**source, **self.buffers()}, (x,))
        # The factor −η_inner stands inside the gradient: two passes over all weights less.
        descent = -self.inner_lr * self.personalization(inner)
        steps = torch.autograd.grad(
            descent, list(source.values()), create_graph=True, materialize_grads=True
        )
        kept = 1 - self.inner_lr * self.weight_decay
        psi_tilde = {
            name: torch.add(step, p, alpha=kept)
            for (name, p), step in zip(psi.items(), steps, strict=True)
        }
        return z, functional_call(self.base, {**psi_tilde, **self.buffers()}, (x,))

    def personalization(self, z: Tensor) -> Tensor:
        """ℓ_per = ‖g(Z; φ)‖₂, Eq. (2), of one batch's logits; "whole": × √(batch-size / n)."""
        norm = torch.linalg.vector_norm(self.adaptation(z))
        return norm * (self.batch_size / len(z)) ** 0.5 if self.inner_loss == "whole" else norm

    def psi(self) -> Parameters:
        """ψ: the base model's parameters that are not frozen, each under its first name."""
        return {name: p for name, p in self.base.named_parameters() if p.requires_grad}

    def buffers(self) -> Parameters:
        """Copies of the base model's buffers: running statistics count a batch once."""
        return {name: b.clone() for name, b in self.base.named_buffers()}

    def steps(self, x: Tensor, count: int, batch_size: int = 0) -> Iterator[Step]:
        """The model before and after each of `count` steps on all of x, Eq. (10)–(12):
        ψ ← ψ − η_inner (clipped ∇_ψ ℓ_per + λψ). `batch_size` replaces the client's."""
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
            with torch.no_grad():
                psi = {
                    name: p - self.inner_lr * (clip * gradient[name] + self.weight_decay * p)
                    for name, p in psi.items()
                }

    def evaluate_at(
        self, psi: Parameters, x: Tensor, *, differentiate: bool, batch_size: int = 0
    ) -> tuple[Tensor, float, Parameters]:
        """f(x; ψ), ℓ_per and ∇_ψ ℓ_per, pass by pass.

        "whole": ℓ_per = √(B/n) √s with s = Σ_j g_j², and ∇√s = Σ_passes ∇s_pass / (2√s).
        "batches": ℓ_per = s / M with s = Σ_b ‖g(batch b)‖₂ over the M batches."""
        psi = {name: p.detach().requires_grad_(differentiate) for name, p in psi.items()}
        size = batch_size or self.batch_size  # B
        logits, total = [], 0.0
        gradient = {name: torch.zeros_like(p) for name, p in psi.items()}
        for batch in self._passes(x, size):
            with torch.set_grad_enabled(differentiate):
                z = functional_call(self.base, {**psi, **self.buffers()}, (batch,))
                s = self._summed(self.adaptation(z), size)
            if differentiate:
                slopes = torch.autograd.grad(s, list(psi.values()), materialize_grads=True)
                for name, g in zip(psi, slopes, strict=True):
                    gradient[name] += g
            logits.append(z.detach())
            total += float(s.detach())
        if self.inner_loss == "batches":
            factor = 1 / -(-len(x) // size)
            ell = factor * total
        else:
            scale, norm = (size / len(x)) ** 0.5, total**0.5
            factor = scale / (2 * norm) if norm else 0.0
            ell = scale * norm
        return torch.cat(logits), ell, {n: factor * g for n, g in gradient.items()}

    def _passes(self, x: Tensor, size: int) -> Sequence[Tensor]:
        """x in parts of at most `adapt_batch_size` samples and about `pass_megabytes`; with
        "batches" a part has whole batches."""
        rows = min(self.adapt_batch_size, len(self.parts(x)[0]))
        if self.inner_loss == "whole" or rows == len(x):
            return x.tensor_split(-(-len(x) // rows))
        return x.split(max(rows // size, 1) * size)

    def _summed(self, g: Tensor, size: int) -> Tensor:
        """The term of s from one pass, given g(Z; φ) (n, 1)."""
        if self.inner_loss == "whole":
            return g.square().sum()
        return torch.stack([torch.linalg.vector_norm(b) for b in g.split(size)]).sum()
