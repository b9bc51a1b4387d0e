"""The inner loop of FedTTA (Ye et al., UPFL, Section 3.2): a base model f(·; ψ) that a model
g(·; φ) of its logits adapts, in training differentiably, afterwards step by step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clients.tent import batch_statistics, entropy

Parameters = Mapping[str, Tensor]


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over the batch of KL(σ(student) ‖ σ(teacher)), from logits (n, C)."""
    log_p, log_q = student.log_softmax(1), teacher.log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


@dataclass(frozen=True)
class Step:
    """The model after `number` adaptation steps: ψ, its logits (n, C), ℓ_per and entropy."""

    number: int
    parameters: Parameters
    logits: Tensor
    personalization: float
    entropy: float


class Adapting:
    """What adapts `base` under `adaptation` with steps of `inner_lr`; see FedTTAClient."""

    base: nn.Module
    adaptation: nn.Module
    inner_lr: float
    first_order: bool
    batch_size: int
    adapt_batch_size: int

    def adapt(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f(x; ψ) and f(x; ψ̃), ψ̃ = ψ − η_inner ∇_ψ ℓ_per, Eq. (3)–(6), differentiable."""
        psi = dict(self.base.named_parameters())
        z = self.base(x)
        source, inner = psi, z
        if self.first_order:
            source = {name: nn.Parameter(p.detach()) for name, p in psi.items()}
            inner = functional_call(self.base, {**source, **self.buffers()}, (x,))
        # The factor −η_inner stands inside the gradient: two passes over all weights less.
        descent = -self.inner_lr * self.personalization(inner)
        steps = torch.autograd.grad(descent, list(source.values()), create_graph=True)
        psi_tilde = {name: p + step for (name, p), step in zip(psi.items(), steps, strict=True)}
        return z, functional_call(self.base, {**psi_tilde, **self.buffers()}, (x,))

    def personalization(self, z: Tensor) -> Tensor:
        """ℓ_per = ‖g(Z; φ)‖₂, Eq. (2), times √(batch-size / n) for n samples."""
        scale = (self.batch_size / len(z)) ** 0.5
        return scale * torch.linalg.vector_norm(self.adaptation(z))

    def buffers(self) -> Parameters:
        """Copies of the base model's buffers: running statistics count a batch once."""
        return {name: b.clone() for name, b in self.base.named_buffers()}

    def steps(self, x: Tensor, count: int) -> Iterator[Step]:
        """The model before and after each of `count` steps on all of x, Eq. (10)–(12)."""
        batch_statistics(self.base, len(x) > 1)
        psi: Parameters = dict(self.base.named_parameters())
        for number in range(count + 1):
            z, ell, gradient = self.evaluate_at(psi, x, differentiate=number < count)
            yield Step(number, psi, z, ell, float(entropy(z)))
            with torch.no_grad():
                psi = {name: p - self.inner_lr * gradient[name] for name, p in psi.items()}

    def evaluate_at(
        self, psi: Parameters, x: Tensor, *, differentiate: bool
    ) -> tuple[Tensor, float, Parameters]:
        """f(x; ψ), ℓ_per and ∇_ψ ℓ_per, batch by batch: ∇√s = Σ_b ∇s_b / (2√s)."""
        psi = {name: p.detach().requires_grad_(differentiate) for name, p in psi.items()}
        logits, total = [], 0.0
        gradient = {name: torch.zeros_like(p) for name, p in psi.items()}
        for batch in x.tensor_split(-(-len(x) // self.adapt_batch_size)):
            with torch.set_grad_enabled(differentiate):
                z = functional_call(self.base, {**psi, **self.buffers()}, (batch,))
                s = self.adaptation(z).square().sum()
            if differentiate:
                for name, g in zip(psi, torch.autograd.grad(s, list(psi.values())), strict=True):
                    gradient[name] += g
            logits.append(z.detach())
            total += float(s.detach())
        scale = (self.batch_size / len(x)) ** 0.5
        norm = total**0.5
        factor = scale / (2 * norm) if norm else 0.0
        return torch.cat(logits), scale * norm, {n: factor * g for n, g in gradient.items()}
