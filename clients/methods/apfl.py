"""APFL client (Deng, Kamani and Mahdavi, 2020, Algorithm 1): a personal model mixed with w.

The client mixes v̄_i = α_i v_i + (1 − α_i) w_i. Every mini-batch takes a step of w_i along ∇F(w_i),
and a step of v_i along the gradient of F(v̄_i) with respect to v_i. The first mini-batch of a round
also takes a step of α_i along ∂F(v̄_i)/∂α_i = ⟨v_i − w_i, ∇F(v̄_i)⟩, Eq. (10).

Departs from the paper: α_i ∈ [0, 1]; the server's w is scored; v_i starts from the first w that the
client receives; the server's mean is weighted by sample counts. The authors' code also adds 0.02 α
to α's gradient, and mixes logits instead of weights."""

import torch
from torch import Tensor

from clients.core.arrays import Arrays, group, prefixed, to_numpy, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.functional import functional_call
from clients.core.protocol import StateUse
from fedapps.common.settings import SHARE, setting
from fedapps.common.tasks import ALL_TASKS


class APFLClient(Client):
    """`mixing` is the first α_i, which is trained if `learn`. ``loss`` is F(w_i) + F(v̄_i)."""

    tasks = ALL_TASKS
    also_scores_global_model = True
    needs_state = StateUse.PREDICTIONS

    mixing = setting(0.5, "first α, the weight of the personal model in the mixture", SHARE)
    learn = setting(True, "train α; false: it is constant")

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Steps of w_i and v_i for each mini-batch, and one step of α_i."""
        self.load(arrays)
        self.w = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        stored_v = to_tensors(group(self.state, "own"), self.device)
        self.v: dict[str, Tensor] = {}
        for name, w_i in self.w.items():
            start = stored_v.get(name, w_i).to(w_i.dtype)  # the state has bfloat16 as float32
            self.v[name] = start.detach().clone().requires_grad_()
        alpha = float(self.state["mixing"]) if stored_v else self.mixing
        self.alpha = torch.tensor(alpha, device=self.device, requires_grad=self.learn)

        def step_of_alpha() -> None:  # α_i ← α_i − η ∂F(v̄_i)/∂α_i
            # Its result has no gradient, so only the round's first mini-batch takes the step.
            if self.alpha.grad is not None:
                self.alpha = (self.alpha.detach() - self.lr * self.alpha.grad).clamp(0, 1)

        parameters = [*self.w.values(), *self.v.values()]
        loss = self.fit_locally(config, parameters=parameters, adjust=step_of_alpha)
        self.state |= prefixed("own", to_numpy(self.v))
        self.state |= to_numpy({"mixing": self.alpha})
        return self.arrays(), len(self.share.train), {"loss": loss, "mixing": float(self.alpha)}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """F(w_i) + F(v̄_i); the mixture passes no gradient to w_i."""
        v_bar: dict[str, Tensor] = {}
        for name, w_i in self.w.items():
            v_bar[name] = w_i.detach().lerp(self.v[name], self.alpha)  # w + α (v − w)
        # Copies, so that running statistics count the mini-batch once.
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        logits = functional_call(self.model, {**v_bar, **buffers}, (x,))
        return super().loss(x, y) + self.criterion(logits, y)

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load v̄_i, the mixture of v_i and the server's w; before any training load w."""
        super().receive(arrays, config)
        v = to_tensors(group(self.state, "own"), self.device)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in v:
                    p.lerp_(v[name].to(p.dtype), float(self.state["mixing"]))
