"""FedTHE client (Jiang and Lin, ICLR 2023): two heads, weighted for each input without labels.

Training: the global model on the balanced softmax CE(z + log(count_y + 1)), y's counts local; see
`clients.methods._two_heads` for the personal head. h^l is the client's mean training feature, h^g
the mean of all clients' h^l. Test, input by input in their order: a_t = α f_t + (1 − α) a_{t−1},
a_1 = f_1, h̃ = β f + (1 − β) a. (e_g, e_l) = σ(ω), from ω = (1, 1) by Adam on s H(σ(e_g g + e_l p))
+ (1 − s)(e_g ‖h̃ − h^g‖ + e_l ‖h̃ − h^l‖), s = cos(σ(g), σ(p)).

ω's rate is 0.1: the authors' is ten times lr, at their lr of 0.01. Ten times our lr of 0.3 would
move ω from both heads to one in a step of Adam.

Another loss than the cross entropy gets z + log(count_y + 1) too. Departs from the authors' code:
there the first input of each later batch repeats the old history, and Adam stops once a batch's
gradient is below 1e-5; here batches do not matter. Training features are those in evaluation mode.
h^g is of the round before, as there. On the same history it agrees with that code to 1e-5
(tests/test_authors_heads.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clients.core.arrays import Arrays
from clients.core.client import Config, Metrics
from clients.core.normalisation import entropies
from clients.core.sgd import Adam
from clients.methods._two_heads import TwoHeadsClient, mixed
from clients.models.head import head_of
from fedapps.common.settings import COUNT, RATE, SHARE, setting
from fedapps.common.tasks import CLASSES


def history(f: Tensor, rate: float) -> Tensor:
    """a_t = α f_t + (1 − α) a_{t−1} (n, d) of features f (n, d), a_1 = f_1."""
    rows = list(f[:1])
    for row in f[1:]:
        rows.append(rows[-1].lerp(row, rate))
    return torch.stack(rows)


def objective(omega: Tensor, g: Tensor, p: Tensor, distances: Tensor) -> Tensor:
    """The objective (n,) of ω (n, 2), by logits (n, C) and (‖h̃ − h^g‖, ‖h̃ − h^l‖) (n, 2)."""
    e = omega.softmax(1)
    s = F.cosine_similarity(g.softmax(1), p.softmax(1), eps=1e-6)
    log_p = mixed(e, g, p).log_softmax(1)
    return s * entropies(log_p) + (1 - s) * (e * distances).sum(1)


@dataclass(frozen=True)
class HeadMixing:
    """(e_g, e_l) of inputs by `means`, h^g and h^l; each input's ω has a gradient of its own."""

    means: tuple[Tensor, Tensor]
    history_rate: float
    feature_share: float
    steps: int
    lr: float

    def __call__(self, g: Tensor, p: Tensor, f: Tensor) -> Tensor:
        """e (n, 2) of logits (n, C) and features (n, d)."""
        h = history(f, self.history_rate).lerp(f, self.feature_share)  # h̃
        global_mean, local_mean = self.means
        to_global = (h - global_mean).norm(dim=1)
        to_local = (h - local_mean).norm(dim=1)
        distances = torch.stack([to_global, to_local], 1)
        omega = g.new_ones(len(g), 2).requires_grad_()
        adam = Adam([omega], self.lr)
        for _ in range(self.steps):
            with torch.enable_grad():
                # The gradient of the sum: each input's term depends on its own ω alone.
                total = objective(omega, g, p, distances).sum()
            (omega.grad,) = torch.autograd.grad(total, omega)
            adam.step()
        return omega.detach().softmax(1)


class FedTHEClient(TwoHeadsClient):
    """`history_rate` is α, `feature_share` β; ω takes `mixing_steps` at `mixing_lr`."""

    tasks: tuple[str, ...] = (CLASSES,)
    vmapped_tensors = ("log_counts",)
    rates: tuple[str, ...] = ("lr", "mixing_lr")

    mixing_steps = setting(20, "steps of Adam on an input's weights of both heads", COUNT)
    mixing_lr = setting(
        0.1, "learning rate of these steps; 0: ten times lr, as in the authors' code", RATE
    )
    history_rate = setting(0.1, "α, an input's part of the running mean of features", SHARE)
    feature_share = setting(0.1, "β, an input's part of what is compared with mean features", SHARE)

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Train the head, then the global model on the balanced softmax."""
        _, y = self.share.train.to(self.device)[:]
        counts = y.bincount(minlength=head_of(self.model).out_features)
        self.log_counts = [(counts + 1.0).log()]
        return super().train(arrays, config)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """CE(z + log(count + 1))."""
        return self.criterion(self.model(x) + self.log_counts[0], y)

    def summary(self, f: Tensor) -> Tensor:
        """h^l (d,)."""
        return f.mean(0)

    def weighing(self, f: Tensor, y: Tensor) -> HeadMixing:
        """The weights by h^g and h^l."""
        return HeadMixing(
            means=(self.received_summary, self.summary(f)),
            history_rate=self.history_rate,
            feature_share=self.feature_share,
            steps=self.mixing_steps,
            lr=self.mixing_lr or 10 * self.lr,
        )
