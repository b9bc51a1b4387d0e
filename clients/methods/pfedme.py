"""pFedMe client (Dinh, Tran and Nguyen, NeurIPS 2020, Algorithm 1).

For each local mini-batch D: θ̃ = argmin_θ L(θ; D) + (λ/2)‖θ − w_i‖² by K inner steps, then
w_i ← w_i − ηλ(w_i − θ̃). θ starts at the server's w in each round, as in the authors' code. The last
θ stays on the client and is scored; if the server holds heads, the client sends the head of the
last θ. A novel client needs a few labels to find a θ near w."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clients.core.arrays import Arrays, group, model_arrays, prefixed, to_numpy
from clients.core.client import Client, Config, Metrics
from clients.core.protocol import StateUse
from clients.core.sgd import SGD, clip_gradients, mini_batches
from fedapps.common.settings import POSITIVE, POSITIVE_INT, setting

HEAD = "head."  # prefix of the head's arrays
PERSONAL = "own"  # group of personal arrays in messages


class PFedMeClient(Client):
    """`lr` is η, `penalty` is λ, `inner_steps` is K; the inner SGD runs with `personal_lr` and
    the local momentum and weight decay. θ_i is stored as ``theta/…`` between rounds."""

    head_by_name = True
    offers = ("near-model",)
    rates = ("lr", "personal_lr")
    needs_state = StateUse.PREDICTIONS

    novel_lr = 0.0  # that is, `personal_lr`
    lr = 0.05  # the published 0.005 moves w too little in tens of rounds
    penalty = setting(15.0, "λ, weight of the distance between θ and w", "(0, 1000000]")
    inner_steps = setting(5, "K, inner steps for each mini-batch", POSITIVE_INT)
    personal_lr = setting(0.09, "learning rate of the inner steps", POSITIVE)

    @classmethod
    def uses_head(cls, values: Mapping[str, Any], /) -> bool:
        """Only if the server holds the heads."""
        return bool(values.get("heads") == "server")

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Returns w_i and keeps θ_i; ``loss`` is the mean of L at the last inner steps."""
        held = group(arrays, PERSONAL)
        self.load({n: a for n, a in arrays.items() if not n.startswith(f"{PERSONAL}/")})
        self.model.train()
        # Tied parameters under all their names, as in the reply.
        theta = dict(self.model.named_parameters(remove_duplicate=False))
        w = {name: p.detach().clone() for name, p in theta.items()}
        samples = self.share.train.to(self.device)
        rows = self.rows(config)
        total_loss = 0.0
        for x, y in mini_batches(samples, rows):
            total_loss += self.solve(x, y, w)
            for name, p in theta.items():
                if not p.requires_grad:
                    continue
                w[name] -= self.lr * self.penalty * (w[name] - p.detach())
        last_theta = model_arrays(self.model, self.frozen)
        reply = self.arrays()  # for running statistics; parameters are those of w
        for name, array in to_numpy(w).items():
            if name not in self.frozen:
                reply[name] = array
        if held:
            reply |= prefixed(PERSONAL, {name: last_theta[name] for name in held})
        else:
            self.state |= prefixed("theta", last_theta)
        return reply, len(self.share.train), {"loss": total_loss / max(len(rows), 1)}

    def solve(self, x: Tensor, y: Tensor, w: dict[str, Tensor], lr: float = 0.0) -> float:
        """Move the model's θ to the proximal point of w for the batch; returns the last L(θ)."""
        lr = lr or self.personal_lr
        optimizer = SGD(self.model.parameters(), lr, self.momentum, self.weight_decay)
        for _ in range(self.inner_steps):
            optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            clip_gradients(optimizer.parameters(), self.local_clip_norm)
            for name, p in self.model.named_parameters():  # + λ(θ − w)
                if not p.requires_grad:
                    continue
                pull = self.penalty * (p.detach() - w[name])
                p.grad = pull if p.grad is None else p.grad + pull
            optimizer.step()
        return float(loss.detach())

    def lacks_state(self, arrays: Arrays) -> bool:
        """As every client; never if the server holds the personal arrays."""
        return super().lacks_state(arrays) and not group(arrays, PERSONAL)

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load θ_i, or w with the personal head; before any training load the server's model."""
        w = {name: a for name, a in arrays.items() if not name.startswith(f"{PERSONAL}/")}
        super().receive(group(self.state, "theta") or w | group(arrays, PERSONAL), config)

    def tune(self, config: Config) -> None:
        """Find a novel client's θ near the server's w, from its few labeled samples."""
        w = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        samples = self.share.train.to(self.device)
        self.model.train()
        for x, y in mini_batches(samples, self.rows(config, "shots")):
            self.solve(x, y, w, self.novel_lr)
        self.model.eval()
