"""Per-FedAvg client (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, Algorithm 1).

w ← w − β ∇F(w) with F(w) = L_D'(w − α ∇L_D(w)), for pairs of mini-batches D and D'. ∇F is exact, of
first order (FO), or approximated by a Hessian-free difference (HF). A training client personalizes
by one step on all its training data; a novel client needs labels for its step. Departs from the
paper: the Hessian is that of D, not of a third mini-batch, so the step is the gradient of one
function. The server's mean is weighted by sample counts."""

import torch
from torch import Tensor

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from clients.core.functional import functional_call
from clients.core.sgd import SGD, clip_gradients
from fedapps.common.settings import POSITIVE, RATE, setting

Batch = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]


class PerFedAvgClient(Client):
    """`lr` is β, `inner_lr` is α, `delta` the δ of the Hessian-free difference."""

    rates = ("lr", "inner_lr")

    # A novel client personalizes like a training client.
    novel_steps = 1
    novel_lr = 0.0
    inner_lr = setting(0.01, "α, also of the step that personalizes; β is the local lr", RATE)
    variant = setting(
        "exact", "how second derivatives are computed", ("exact", "first-order", "hessian-free")
    )
    delta = setting(
        0.001, "δ of the Hessian-free difference", POSITIVE, beside="variant=hessian-free"
    )

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """One meta step for each pair of mini-batches; ``loss`` is the mean of F."""
        self.load(arrays)
        self.model.train()
        optimizer = SGD(self.model.parameters(), self.lr, self.momentum, self.weight_decay)
        samples = self.share.train.to(self.device)
        rows_of_d = self.rows(config, "inner")
        rows_of_d_prime = self.rows(config)
        total = 0.0
        for d, d_prime in zip(rows_of_d, rows_of_d_prime, strict=True):
            value, gradient = self.meta_gradient(samples[d], samples[d_prime])
            for name, parameter in self.weights().items():
                parameter.grad = gradient[name]
            clip_gradients(optimizer.parameters(), self.local_clip_norm)
            optimizer.step()
            total += value
        return self.arrays(), len(self.share.train), {"loss": total / max(len(rows_of_d), 1)}

    def meta_gradient(self, d: Batch, d_prime: Batch) -> tuple[float, Weights]:
        """F(w) and its gradient at the model's weights, exact or as the variant approximates."""
        w = self.weights()
        exact = self.variant == "exact"
        step = self.gradient(w, d, graph=exact)
        w_tilde = {name: p - self.inner_lr * step[name] for name, p in w.items()}
        if exact:
            value = self.risk(w_tilde, d_prime)
            return float(value.detach()), _grad(value, w)
        w_tilde = {name: p.detach().requires_grad_() for name, p in w_tilde.items()}
        value = self.risk(w_tilde, d_prime)
        v = _grad(value, w_tilde)
        if self.variant == "hessian-free":  # v − α (∇L_D(w + δv) − ∇L_D(w − δv)) / 2δ
            plus = self.gradient(self._moved(w, self.delta, v), d)
            minus = self.gradient(self._moved(w, -self.delta, v), d)
            factor = self.inner_lr / (2 * self.delta)
            v = {name: v[name] - factor * (plus[name] - minus[name]) for name in v}
        return float(value.detach()), v

    def _moved(self, w: Weights, delta: float, v: Weights) -> Weights:
        """w + δv, without gradients to w."""
        return {name: p.detach() + delta * v[name] for name, p in w.items()}

    def weights(self) -> Weights:
        """The parameters that are not frozen, each under its first name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def risk(self, weights: Weights, batch: Batch) -> Tensor:
        """L(weights): mean cross entropy of the batch."""
        x, y = batch
        return self.criterion(functional_call(self.model, weights, (x,)), y)

    def gradient(self, weights: Weights, batch: Batch, graph: bool = False) -> Weights:
        """∇L(weights), differentiable if `graph`."""
        for p in weights.values():
            if not p.requires_grad:
                p.requires_grad_()
        return _grad(self.risk(weights, batch), weights, graph)

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load w − α ∇L(w) of all the training data; a novel client takes `novel_steps` steps."""
        super().receive(arrays, config)
        novel = self.share.novel
        if not len(self.share.train) or (novel and not self.share.shots):
            return
        lr = self.inner_lr
        num_steps = 1
        if novel:
            lr = self.novel_lr or self.inner_lr
            num_steps = self.novel_steps
        self.model.train()
        w = self.weights()
        for _ in range(num_steps):
            step = self.gradient(w, self.share.train.to(self.device)[:])
            with torch.no_grad():
                for name, parameter in w.items():
                    parameter.sub_(lr * step[name])
        self.model.eval()

    def tune(self, config: Config) -> None:
        """Nothing: `receive` takes the steps on a novel client's few labels."""


def _grad(value: Tensor, weights: Weights, graph: bool = False) -> Weights:
    """The gradient of `value` with respect to the weights, differentiable if `graph`."""
    gradients = torch.autograd.grad(
        value, list(weights.values()), create_graph=graph, materialize_grads=True
    )
    return dict(zip(weights, gradients, strict=True))
