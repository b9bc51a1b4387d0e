"""APFL client (Deng, Kamani and Mahdavi, 2020, Algorithm 1): a personal model mixed with w.

v̄_i = α_i v_i + (1 − α_i) w_i. Every mini-batch moves w_i by ∇F(w_i), v_i by the gradient of
F(v̄_i) with respect to v_i, and the round's first one α_i by that with respect to α_i, which is
⟨v_i − w_i, ∇F(v̄_i)⟩, Eq. (10). Departs from the paper: α_i ∈ [0, 1]; the server's w is scored; v_i
starts from the first w that the client gets; the server's mean is weighted by sample counts, not
plain. The authors' code also adds 0.02 α to α's gradient and mixes logits, not weights."""

import torch
from torch import Tensor
from torch.func import functional_call

from clients.core.arrays import Arrays, group, prefixed, to_numpy, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.protocol import StateUse
from fedapps.common.settings import SHARE, setting


class APFLClient(Client):
    """`mixing` is α_i at the start, trained if `learn`; ``loss`` is the sum of both losses."""

    also_scores_global_model = True
    needs_state = StateUse.PREDICTIONS

    mixing = setting(0.5, "α at the start: the personal model's part of the mixture", SHARE)
    learn = setting(True, "whether α is trained, or constant")

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """FedAvg's steps of w_i, each with one of v_i and the first one with one of α_i."""
        self.load(arrays)
        named = self.model.named_parameters()
        self.w = w = {name: p for name, p in named if p.requires_grad}
        stored = to_tensors(group(self.state, "own"), self.device)
        self.v = {n: stored.get(n, p).detach().clone().requires_grad_() for n, p in w.items()}
        alpha = float(self.state["mixing"]) if stored else self.mixing
        self.alpha = torch.tensor(alpha, device=self.device, requires_grad=self.learn)

        def adapt() -> None:  # α_i ← α_i − η ∂F(v̄_i)/∂α_i, in the round's first step
            if self.alpha.grad is not None:
                self.alpha = (self.alpha.detach() - self.lr * self.alpha.grad).clamp(0, 1)

        loss = self.fit_locally(config, parameters=[*w.values(), *self.v.values()], adjust=adapt)
        self.state |= prefixed("own", to_numpy(self.v)) | to_numpy({"mixing": self.alpha})
        return self.arrays(), len(self.share.train), {"loss": loss, "mixing": float(self.alpha)}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """F(w_i) + F(v̄_i); the mixture passes no gradient to w_i."""
        mixed = {n: p.detach().lerp(self.v[n], self.alpha) for n, p in self.w.items()}
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        logits = functional_call(self.model, {**mixed, **buffers}, (x,))
        return super().loss(x, y) + self.criterion(logits, y)

    def receive(self, arrays: Arrays, config: Config) -> None:
        """v̄_i of v_i and the server's w; w itself before any training."""
        super().receive(arrays, config)
        v = to_tensors(group(self.state, "own"), self.device)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in v:
                    p.lerp_(v[name], float(self.state["mixing"]))
