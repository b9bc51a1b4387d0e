"""FedALA client (Zhang et al., AAAI 2023, Algorithm 1): element-wise mixing of w and θ_i.

A round starts from θ̂_i = θ_i + (w − θ_i) ⊙ W_i in the top layers and from w below, Eq. (4). W_i in
[0, 1] is trained on a part of the local data, in the first round until its loss settles, later in
one pass. The network is in training mode meanwhile, as in the authors' code if all clients take
part; there, evaluation may leave a client that pauses in evaluation mode. Departs from the paper:
scoring uses the last W_i and trains none. Departs from that code: the loss that settles is the mean
over a pass, of ten passes, not the last batch's of eleven, and 100 passes are the most."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from clients.core.arrays import Arrays, group, model_arrays, prefixed, to_numpy, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.criterion import Criterion
from clients.core.protocol import StateUse
from clients.models.foreign import layers_by_call
from fedapps.common.settings import POSITIVE_INT, RATE, setting

MAX_PASSES = 100  # that train W_i in the first round
TOLERANCE, WINDOW = 0.1, 10  # deviation of the losses of so many passes that ends training
Tensors = Mapping[str, Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]


class FedALAClient(Client):
    """W_i of the last `layers` layers is trained at `mixing_lr` on a `mixing_share` of the data."""

    rates = ("lr", "mixing_lr")
    also_scores_global_model = True
    needs_state = StateUse.PREDICTIONS

    mixing_lr = setting(1.0, "η, learning rate of the mixture's weights", RATE)
    mixing_share = setting(0.8, "share of the local mini-batches that train them", "(0, 1]")
    layers = setting(
        1, "layers from the top that are mixed; the others are the server's", POSITIVE_INT
    )

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Train W_i, then FedAvg's steps from θ̂_i."""
        if group(self.state, "own"):
            self.learn(arrays, config)
        reply = super().train(self.mixed(arrays), config)
        self.state |= prefixed("own", model_arrays(self.model, self.frozen))
        return reply

    def mixed(self, arrays: Arrays) -> Arrays:
        """θ̂_i, Eq. (4); w before any W_i was trained."""
        theta, weight = group(self.state, "own"), group(self.state, "mixing")
        return arrays | {n: theta[n] + (arrays[n] - theta[n]) * weight[n] for n in weight}

    def learn(self, arrays: Arrays, config: Config) -> None:
        """Train W_i from θ_i and the server's w."""
        self.load(arrays)
        theta = to_tensors(group(self.state, "own"), self.device)
        known = to_tensors(group(self.state, "mixing"), self.device)
        weight: Tensors = known
        if not known:
            x, _ = self.share.train.to(self.device)[:1]
            names = top_layers(self.model, self.layers, x)
            weight = {name: torch.ones_like(theta[name]) for name in names}
        self.model.train()
        rows = self.rows(config, "mixing", epochs=1)
        rows = [row for row in rows if len(row) > 1] or rows  # one sample has no batch statistics
        rows = rows[: max(1, round(self.mixing_share * len(rows)))]
        batches = [self.share.train.to(self.device)[index] for index in rows]
        passes = 1 if known else MAX_PASSES
        weight = train_weights(
            self.model, theta, weight, batches, self.mixing_lr, passes, self.criterion
        )
        self.state |= prefixed("mixing", to_numpy(weight))

    def receive(self, arrays: Arrays, config: Config) -> None:
        """θ̂_i."""
        super().receive(self.mixed(arrays), config)


def top_layers(model: nn.Module, count: int, x: Tensor) -> list[str]:
    """The names of the trained parameters of the last `count` layers that a forward pass of x ends
    with."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    owners = {name: name.rpartition(".")[0] for name in trained}
    layers = [layer for layer in layers_by_call(model, x) if layer in owners.values()]
    return [name for name in trained if owners[name] in layers[-count:]]


def train_weights(
    model: nn.Module,
    theta: Tensors,
    weight: Tensors,
    batches: Batches,
    lr: float,
    max_passes: int,
    criterion: Criterion = F.cross_entropy,
) -> Tensors:
    """W after at most `max_passes` over the batches, until their loss settles; model holds w."""
    losses: list[float] = []
    while len(losses) < max_passes and not (
        len(losses) >= WINDOW and np.std(losses[-WINDOW:]) < TOLERANCE
    ):
        weight, loss = one_pass(model, theta, weight, batches, lr, criterion)
        losses.append(loss)
    return weight


def one_pass(
    model: nn.Module,
    theta: Tensors,
    weight: Tensors,
    batches: Batches,
    lr: float,
    criterion: Criterion = F.cross_entropy,
) -> tuple[Tensors, float]:
    """W after a step on every batch, and their mean loss.

    W ← clip(W − η ∇_W L(θ̂)), where ∇_W L = ∇_θ̂ L ⊙ (w − θ), Eq. (5)."""
    w = {name: p.detach() for name, p in model.named_parameters() if name in weight}
    losses = []
    for x, y in batches:
        at = {name: w_i.requires_grad_() for name, w_i in weight.items()}
        hat = {name: theta[name] + (w[name] - theta[name]) * at[name] for name in at}
        loss = criterion(functional_call(model, hat, (x,)), y)
        slopes = torch.autograd.grad(loss, list(at.values()), materialize_grads=True)
        steps = zip(at.items(), slopes, strict=True)
        weight = {name: (a - lr * slope).detach().clamp(0, 1) for (name, a), slope in steps}
        losses.append(float(loss.detach()))
    return weight, sum(losses) / len(losses)
