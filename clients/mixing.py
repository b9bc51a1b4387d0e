"""θ̂ = θ + (w − θ) ⊙ W: a mixture of two models, and the training of its weights (FedALA)."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

Tensors = Mapping[str, Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]
TOLERANCE, WINDOW = 0.1, 10  # deviation of the losses of so many passes that ends training


def top_layers(model: nn.Module, count: int) -> list[str]:
    """The names of the parameters of the last `count` layers."""
    names = [name for name, _ in model.named_parameters()]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))[-count:]
    return [name for name in names if name.rpartition(".")[0] in layers]


def train_weights(
    model: nn.Module, theta: Tensors, weight: Tensors, batches: Batches, lr: float, max_passes: int
) -> Tensors:
    """W after at most `max_passes` over the batches, until their loss settles; model holds w."""
    losses: list[float] = []
    while len(losses) < max_passes and not (
        len(losses) >= WINDOW and np.std(losses[-WINDOW:]) < TOLERANCE
    ):
        weight, loss = one_pass(model, theta, weight, batches, lr)
        losses.append(loss)
    return weight


def one_pass(
    model: nn.Module, theta: Tensors, weight: Tensors, batches: Batches, lr: float
) -> tuple[Tensors, float]:
    """W after a step on every batch, and their mean loss.

    W ← clip(W − η ∇_W L(θ̂)), where ∇_W L = ∇_θ̂ L ⊙ (w − θ), Eq. (5)."""
    w = {name: p.detach() for name, p in model.named_parameters() if name in weight}
    losses = []
    for x, y in batches:
        at = {name: w_i.requires_grad_() for name, w_i in weight.items()}
        hat = {name: theta[name] + (w[name] - theta[name]) * at[name] for name in at}
        loss = F.cross_entropy(functional_call(model, hat, (x,)), y)
        slopes = torch.autograd.grad(loss, list(at.values()))
        steps = zip(at.items(), slopes, strict=True)
        weight = {name: (a - lr * slope).detach().clamp(0, 1) for (name, a), slope in steps}
        losses.append(float(loss.detach()))
    return weight, sum(losses) / len(losses)
