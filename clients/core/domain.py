"""One client's part in training a linear domain classifier (Ben-David et al., NeurIPS 2006).

The classifier separates the inputs of two clients. Its weights come from the server; the client
answers with gradients and error rates, so no input leaves it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from clients.core.arrays import Arrays, to_numpy
from partitions.shares import Samples


def domain_gradient(samples: Samples, weights: Tensor, side: float, seed: int) -> Arrays:
    """For p classifiers of f inputs and a bias: the `gradient` (p, f + 1) of the mean logistic loss
    on one half of the inputs, and the `error` rate (p,) on the other half; of one input on itself.

    `side` is the label, 0 or 1. Inputs are shifted by −1/2, which changes no distance."""
    x = samples[:][0].flatten(1) - 0.5
    x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    fit, held_out = x[order].tensor_split(2) if len(x) > 1 else (x, x)
    w = weights.to(x.device).requires_grad_()
    logits = fit @ w.T
    target = torch.full_like(logits, side)
    loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(0).sum()
    (gradient,) = torch.autograd.grad(loss, w)
    wrong = (held_out @ w.detach().T > 0).float() != side
    return to_numpy({"gradient": gradient, "error": wrong.float().mean(0)})
