"""The client's gradients for a linear domain classifier (Ben-David et al., NeurIPS 2006).

The classifier separates the inputs of two clients. The server sends its weights. The client
answers with gradients and error rates, so no input leaves the client."""

import torch
from torch import Tensor
from torch.nn import functional as F

from clients.core.arrays import Arrays, to_numpy
from partitions.shares import Samples


def domain_gradient(samples: Samples, weights: Tensor, side: float, seed: int) -> Arrays:
    """The `gradient` (p, f + 1) and the `error` rate (p,) of p classifiers.

    `weights` (p, f + 1) are for inputs of f entries and a bias. `side` is the label, 0 or 1. The
    gradient is that of the mean logistic loss on one half of the inputs; the error rate is measured
    on the other half. A single input serves for both. Inputs are shifted by −1/2, which changes no
    distance."""
    x = samples[:][0].flatten(1) - 0.5
    x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)  # the last column is for the bias
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    fit = held_out = x
    if len(x) > 1:
        fit, held_out = x[order].tensor_split(2)
    w = weights.to(x.device).requires_grad_()
    logits = fit @ w.T
    target = torch.full_like(logits, side)
    loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(0).sum()
    (gradient,) = torch.autograd.grad(loss, w)
    wrong = (held_out @ w.detach().T > 0).float() != side
    return to_numpy({"gradient": gradient, "error": wrong.float().mean(0)})
