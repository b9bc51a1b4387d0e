"""FedALA client (Zhang et al., AAAI 2023, Algorithm 1): element-wise mixing of w and θ_i.

w is the server's model, θ_i the client's last local model and W_i the mixing weights in [0, 1]. A
round starts from θ̂_i = θ_i + (w − θ_i) ⊙ W_i in the top layers, Eq. (4), and from w in the other
layers. W_i is trained on a part of the local data: in the first round until its loss converges,
later in one pass.

W_i is trained in training mode. In the authors' code this is so if all clients take part in every
round; else evaluation may leave the network in evaluation mode. Departs from the paper: scoring
uses the last W_i without training. Departs from the authors' code: convergence is judged by the
mean losses of ten passes, not by the last batch's losses of eleven, and training ends after 100
passes at the latest."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays, group, model_arrays, prefixed, to_numpy, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.criterion import Criterion
from clients.core.functional import functional_call
from clients.core.protocol import StateUse
from clients.models.foreign import layers_by_call
from fedapps.common.settings import POSITIVE_INT, RATE, setting

MAX_PASSES = 100  # most passes that train W_i in the first round
# Training ends if the losses of the last WINDOW passes have a deviation below TOLERANCE.
WINDOW = 10
TOLERANCE = 0.1
Tensors = Mapping[str, Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]


class FedALAClient(Client):
    """W_i of the last `layers` layers is trained at `mixing_lr` on a `mixing_share` of the data."""

    any_optimizer = True
    any_loss = False  # W_i is learnt on the loss of outputs and labels
    rates = ("lr", "mixing_lr")
    also_scores_global_model = True
    needs_state = StateUse.PREDICTIONS

    mixing_lr = setting(1.0, "η, learning rate of the mixing weights", RATE)
    mixing_share = setting(
        0.8, "share of the local mini-batches that train the mixing weights", "(0, 1]"
    )
    layers = setting(
        1, "number of top layers that are mixed; lower layers are the server's", POSITIVE_INT
    )

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Train W_i, then FedAvg's steps from θ̂_i."""
        if group(self.state, "own"):
            self.learn(arrays, config)
        reply = super().train(self.mixed(arrays), config)
        self.state |= prefixed("own", model_arrays(self.model, self.frozen))
        return reply

    def mixed(self, arrays: Arrays) -> Arrays:
        """θ̂_i, Eq. (4); w before W_i has been trained."""
        theta = group(self.state, "own")
        mixing_weights = group(self.state, "mixing")
        theta_hat = dict(arrays)
        for name, weight in mixing_weights.items():
            w = arrays[name]
            theta_hat[name] = theta[name] + (w - theta[name]) * weight
        return theta_hat

    def learn(self, arrays: Arrays, config: Config) -> None:
        """Train W_i from θ_i and the server's w."""
        self.load(arrays)
        theta = to_tensors(group(self.state, "own"), self.device)
        weight: Tensors = to_tensors(group(self.state, "mixing"), self.device)
        max_passes = 1
        if not weight:
            max_passes = MAX_PASSES
            x, _ = self.share.train.to(self.device)[:2]  # one has no batch statistics
            names = top_layers(self.model, self.layers, x)
            weight = {name: torch.ones_like(theta[name]) for name in names}
        self.model.train()
        batches = self.mixing_batches(config)
        weight = train_weights(
            self.model, theta, weight, batches, self.mixing_lr, max_passes, self.criterion
        )
        self.state |= prefixed("mixing", to_numpy(weight))

    def mixing_batches(self, config: Config) -> Batches:
        """The mini-batches that train W_i: a share of one epoch."""
        rows = self.rows(config, "mixing", epochs=1)
        # One sample has no batch statistics.
        rows = [row for row in rows if len(row) > 1] or rows
        count = max(1, round(self.mixing_share * len(rows)))
        samples = self.share.train.to(self.device)
        return [samples[row] for row in rows[:count]]

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load θ̂_i."""
        super().receive(self.mixed(arrays), config)


def top_layers(model: nn.Module, count: int, x: Tensor) -> list[str]:
    """The names of the trained parameters of the last `count` layers.

    A forward pass of x decides the order of the layers."""
    layer_of: dict[str, str] = {}  # the layer of each trained parameter
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer_of[name] = name.rpartition(".")[0]
    trained_layers = set(layer_of.values())
    layers = [layer for layer in layers_by_call(model, x) if layer in trained_layers]
    top = layers[-count:]
    return [name for name, layer in layer_of.items() if layer in top]


def train_weights(
    model: nn.Module,
    theta: Tensors,
    weight: Tensors,
    batches: Batches,
    lr: float,
    max_passes: int,
    criterion: Criterion,
) -> Tensors:
    """W after at most `max_passes` over the batches, until the loss converges; `model` holds w."""
    losses: list[float] = []
    for _ in range(max_passes):
        if len(losses) >= WINDOW and np.std(losses[-WINDOW:]) < TOLERANCE:
            break
        weight, loss = one_pass(model, theta, weight, batches, lr, criterion)
        losses.append(loss)
    return weight


def one_pass(
    model: nn.Module,
    theta: Tensors,
    weight: Tensors,
    batches: Batches,
    lr: float,
    criterion: Criterion,
) -> tuple[Tensors, float]:
    """W after a step on every batch, and the batches' mean loss.

    W ← clip(W − η ∇_W L(θ̂)), where ∇_W L = ∇_θ̂ L ⊙ (w − θ), Eq. (5)."""
    w = {name: p.detach() for name, p in model.named_parameters() if name in weight}
    losses = []
    for x, y in batches:
        theta_hat: dict[str, Tensor] = {}
        for name, weight_i in weight.items():
            weight_i.requires_grad_()
            theta_hat[name] = theta[name] + (w[name] - theta[name]) * weight_i
        loss = criterion(functional_call(model, theta_hat, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weight.values()), materialize_grads=True)
        next_weight: dict[str, Tensor] = {}
        for (name, weight_i), slope in zip(weight.items(), slopes, strict=True):
            next_weight[name] = (weight_i - lr * slope).detach().clamp(0, 1)
        weight = next_weight
        losses.append(float(loss.detach()))
    return weight, sum(losses) / len(losses)
