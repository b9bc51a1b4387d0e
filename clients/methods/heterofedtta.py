"""HeteroFedTTA client (Ye et al., UPFL, Algorithm 2): FedTTA inside FedMD.

Two sets of logits travel, the base and the personalized model's, Eq. (14). The paper leaves open
what a model is adapted to for its public logits: `adapt_on` says it, in the authors' code
"public-set". The mean over a batch replaces the sum over D_p, as in the other losses. Departs from
that code: momentum begins anew in the digest and in the revisit; public batches are shuffled.

η_outer is 0.3 by default, as in FedTTA here. With few local steps a round, the paper's 0.1 is too
low for the consensus to learn the classes."""

import torch
from torch import Tensor, nn

from clients.core.normalisation import batch_statistics
from clients.methods._divergence import divergence
from clients.methods.fedmd import FedMDClient, Logits
from clients.methods.fedtta import FedTTAClient
from clients.models.networks import MLP, ConvNet, LeNet
from fedapps.common.settings import NONNEGATIVE, setting
from fedapps.common.tasks import CLASS_PROBABILITIES
from partitions.datasets.loading import Info


def width_of_table_3(model: nn.Module) -> int:
    """32, 64 or 128 for the small, medium or big network of its kind, by the width of the first
    layer; 32 for other kinds of networks."""
    if isinstance(model, ConvNet):  # 16, 32, 64 channels
        return 2 * model.conv1.out_channels
    if isinstance(model, LeNet):  # 8, 16, 32 channels
        return 4 * model.conv1.out_channels
    if isinstance(model, MLP) and len(model.layers):  # 100, 200, 400 units
        units = len(next(model.layers[0].parameters()))
        return {100: 32, 200: 64, 400: 128}.get(units, 32)
    return 32


class HeteroFedTTAClient(FedMDClient, FedTTAClient):
    """`base_weight` is λ, which weighs the base model's distillation.

    For its public logits the base model is adapted to each public batch ("public", as the student
    in Eq. (14)), by one step to the whole public set ("public-set") or to its training inputs
    ("own")."""

    tasks = CLASS_PROBABILITIES
    adapt_lr = 0.005
    adaptation_width = setting(
        0, "units of the adaptation model's hidden layers; 0: by size, Table 3", "[0, 4096]"
    )
    base_weight = setting(0.8, "λ, weight of the base model's distillation", NONNEGATIVE)
    adapt_on = setting(
        "public",
        "adapt for public logits to: public batches, the public set in one step, own data",
        ("public", "public-set", "own"),
    )

    @classmethod
    def build(cls, model: nn.Module, info: Info, *, adaptation_width: int, seed: int) -> nn.Module:
        """An adaptation network; width 0 is 32, 64 or 128 by the model's size, Table 3."""
        width = adaptation_width or width_of_table_3(model)
        return super().build(model, info, adaptation_width=width, seed=seed)

    def distillation(self, x: Tensor, teacher: Logits) -> Tensor:
        """KL(σ(f(x; ψ̃ˢ)) ‖ σ(f(x; ψ̃ᵗ))) + λ KL(σ(f(x; ψˢ)) ‖ σ(f(x; ψᵗ))), Eq. (14),
        or the reverse by `kl_direction`."""
        z, adapted = self.adapt(x)
        base = divergence(z, teacher["logits/base"], self.kl_direction)
        personalized = divergence(adapted, teacher["logits/personalized"], self.kl_direction)
        return personalized + self.base_weight * base

    def communicate(self) -> Logits:
        """f(D_p; ψ) and f(D_p; ψ̃)."""
        batch_statistics(self.base)
        public = self.public.to(self.device)
        if self.adapt_on == "public":
            base_parts = []
            personalized_parts = []
            for x in public.split(self.public_batch_size):
                z, adapted = self.adapt(x)
                base_parts.append(z.detach())
                personalized_parts.append(adapted.detach())
            base = torch.cat(base_parts)
            personalized = torch.cat(personalized_parts)
        elif self.adapt_on == "public-set":
            # "whole" learns and takes its steps at one B, as in `distillation`
            size = self.public_batch_size if self.inner_loss == "batches" else 0
            before, after = self.steps(public, 1, size)
            base = before.logits
            personalized = after.logits
        else:
            inputs, _ = self.share.train.to(self.device)[:]
            *_, last = self.steps(inputs, 1)
            base = self.evaluate_at(self.psi(), public, differentiate=False)[0]
            personalized = self.evaluate_at(last.parameters, public, differentiate=False)[0]
        return {"logits/base": base, "logits/personalized": personalized}
