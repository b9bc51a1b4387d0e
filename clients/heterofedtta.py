"""HeteroFedTTA client (Ye et al., UPFL, Algorithm 2): FedTTA inside FedMD.

Two sets of logits travel, the base and the personalized model's, Eq. (14). Departs from the paper,
which leaves it open what a model is adapted to for its public logits: `adapt_on`. The mean over a
batch stands for the sum over D_p, since the learning rates are those of mean losses."""

from typing import Any

import torch
from torch import Tensor, nn

from clients.adaptation import kl
from clients.fedmd import FedMDClient, Logits
from clients.fedtta import FedTTAClient
from clients.models.adaptable import Adaptable, Adaptation
from clients.models.networks import ConvNet
from clients.tent import batch_statistics
from partitions.datasets import Info

ADAPT_ON = ("public", "own")


class HeteroFedTTAClient(FedMDClient, FedTTAClient):
    """`base_weight` is λ, which weighs the base model's distillation.

    Its public logits are of the base model adapted to each public batch ("public", as the student
    is in Eq. (14)) or to its own training inputs ("own")."""

    def __init__(
        self,
        *args: Any,
        adapt_lr: float = 0.005,
        base_weight: float = 0.8,
        adapt_on: str = "public",
        **options: Any,
    ) -> None:
        super().__init__(*args, adapt_lr=adapt_lr, **options)
        if base_weight < 0:
            raise ValueError(f"base-weight is {base_weight}; it must not be negative")
        if adapt_on not in ADAPT_ON:
            raise ValueError(f"unknown adapt-on {adapt_on!r}; known: {ADAPT_ON}")
        self.base_weight, self.adapt_on = base_weight, adapt_on

    @classmethod
    def build(cls, model: nn.Module, info: Info, *, adaptation_width: int = 0) -> nn.Module:
        """An adaptation network as wide as Table 3 has it for 0: 32, 64, 128 by size."""
        small = 2 * model.conv1.out_channels if isinstance(model, ConvNet) else 32
        return Adaptable(model, Adaptation(info.num_classes, adaptation_width or small))

    def distillation(self, x: Tensor, teacher: Logits) -> Tensor:
        """KL(σ(f(x; ψ̃ˢ)) ‖ σ(f(x; ψ̃ᵗ))) + λ KL(σ(f(x; ψˢ)) ‖ σ(f(x; ψᵗ))), Eq. (14)."""
        z, adapted = self.adapt(x)
        base = kl(z, teacher["logits/base"])
        return kl(adapted, teacher["logits/personalized"]) + self.base_weight * base

    def communicate(self) -> Logits:
        """f(D_p; ψ) and f(D_p; ψ̃)."""
        batch_statistics(self.base)
        public = self.public.to(self.device)
        if self.adapt_on == "own":
            own = self.share.train.to(self.device)[:][0]
            *_, last = self.steps(own, 1)
            psi = dict(self.base.named_parameters())
            base = self.evaluate_at(psi, public, differentiate=False)[0]
            personalized = self.evaluate_at(last.parameters, public, differentiate=False)[0]
        else:
            pairs = [self.adapt(x) for x in public.split(self.batch_size)]
            base, personalized = (torch.cat(part).detach() for part in zip(*pairs, strict=True))
        return {"logits/base": base, "logits/personalized": personalized}
