"""Per-FedAvg client (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, Algorithm 1).

w ← w − β ∇F(w), F(w) = L_D'(w − α ∇L_D(w)), with the exact second-order gradient, first order (FO)
or a Hessian-free difference (HF). Departs from the paper: the Hessian is D's, not a third batch's,
so the step is the gradient of one function. The server weighs by samples, where Algorithm 1 has the
plain mean. A training client personalizes by one step on all its training data; a novel client
needs labels for its step."""

import torch
from torch import Tensor
from torch.func import functional_call

from clients.core.arrays import Arrays
from clients.core.client import Client, Config, Metrics
from clients.core.optimizers import SGD
from fedapps.common.settings import POSITIVE, RATE, setting

Batch = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]


class PerFedAvgClient(Client):
    """`lr` is β, `inner_lr` is α, `delta` the δ of the Hessian-free difference."""

    rates = ("lr", "inner_lr")

    novel_steps, novel_lr = 1, 0.0  # as a training client
    inner_lr = setting(0.01, "α, also of the step that personalizes; β is the local lr", RATE)
    variant = setting("exact", "second derivatives", ("exact", "first-order", "hessian-free"))
    delta = setting(
        0.001, "δ of the Hessian-free difference", POSITIVE, beside="variant=hessian-free"
    )

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """One meta step for each pair of mini-batches; ``loss`` is the mean of F."""
        self.load(arrays)
        self.model.train()
        optimizer = SGD(self.model.parameters(), self.lr, self.momentum, self.weight_decay)
        samples, total = self.share.train.to(self.device), 0.0
        inner, outer = self.rows(config, "inner"), self.rows(config)
        for first, second in zip(inner, outer, strict=True):
            value, gradient = self.meta_gradient(samples[first], samples[second])
            for name, parameter in self.weights().items():
                parameter.grad = gradient[name]
            optimizer.step()
            total += value
        return self.arrays(), len(self.share.train), {"loss": total / max(len(outer), 1)}

    def meta_gradient(self, d: Batch, d_prime: Batch) -> tuple[float, Weights]:
        """F(w) and its gradient at the model's weights, exact or as the variant approximates."""
        w = self.weights()
        exact = self.variant == "exact"
        step = self.gradient(w, d, graph=exact)
        moved = {name: p - self.inner_lr * step[name] for name, p in w.items()}  # w̃
        if exact:
            value = self.risk(moved, d_prime)
            return float(value.detach()), _grad(value, w)
        tilde = {name: p.detach().requires_grad_() for name, p in moved.items()}
        value = self.risk(tilde, d_prime)
        v = _grad(value, tilde)
        if self.variant == "hessian-free":  # v − α (∇L_D(w + δv) − ∇L_D(w − δv)) / 2δ
            up = self.gradient({n: p.detach() + self.delta * v[n] for n, p in w.items()}, d)
            down = self.gradient({n: p.detach() - self.delta * v[n] for n, p in w.items()}, d)
            factor = self.inner_lr / (2 * self.delta)
            v = {name: v[name] - factor * (up[name] - down[name]) for name in v}
        return float(value.detach()), v

    def weights(self) -> Weights:
        """The parameters that are not frozen, each under its first name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def risk(self, weights: Weights, batch: Batch) -> Tensor:
        """L(weights): mean cross entropy of the batch."""
        x, y = batch
        return self.criterion(functional_call(self.model, weights, (x,)), y)

    def gradient(self, weights: Weights, batch: Batch, graph: bool = False) -> Weights:
        """∇L(weights), differentiable if `graph`."""
        at = {n: p if p.requires_grad else p.requires_grad_() for n, p in weights.items()}
        return _grad(self.risk(at, batch), at, graph)

    def receive(self, arrays: Arrays, config: Config) -> None:
        """w − α ∇L(w) of all the training data; a novel client takes `novel_steps` such steps."""
        super().receive(arrays, config)
        novel = self.share.novel
        if len(self.share.train) and (self.share.shots or not novel):
            self.model.train()
            w, rate = self.weights(), novel * self.novel_lr or self.inner_lr
            for _ in range(self.novel_steps if novel else 1):
                step = self.gradient(w, self.share.train.to(self.device)[:])
                with torch.no_grad():
                    for name, parameter in w.items():
                        parameter.sub_(rate * step[name])
            self.model.eval()

    def tune(self, config: Config) -> None:
        """Nothing: `receive` takes the steps on a novel client's few labels."""


def _grad(value: Tensor, weights: Weights, graph: bool = False) -> Weights:
    gradients = torch.autograd.grad(
        value, list(weights.values()), create_graph=graph, materialize_grads=True
    )
    return dict(zip(weights, gradients, strict=True))
