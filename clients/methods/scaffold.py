"""SCAFFOLD client (Karimireddy et al., ICML 2020, Algorithm 1, lines 7-15).

Control variates by option II; `c_i` stays on the client, also in rounds without it.
Departs from the paper: running statistics of normalisation layers are averaged."""

from typing import Any

import numpy as np

from clients.core.arrays import Arrays, group, is_statistic, prefixed, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.protocol import StateUse


class ScaffoldClient(Client):
    """Local SGD corrected by c − c_i. Plain SGD only: option II divides by K·η_l."""

    needs_state = StateUse.TRAINING

    lr = 0.1  # η_l

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.momentum:
            raise ValueError(f"momentum is {self.momentum}; SCAFFOLD's control variates need 0")
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; SCAFFOLD's control variates need more than 0")

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Returns Δy_i as ``delta/…``, Δc_i as ``control/…``, and statistics as they are."""
        c = group(arrays, "control")
        x = {name: a for name, a in arrays.items() if not name.startswith("control/")}
        self.load(x)
        c_i = {n: np.zeros_like(a) for n, a in c.items()} | group(self.state, "control")
        names = [name for name, _ in self.model.named_parameters()]
        none = np.zeros(1, np.float32)  # for frozen parameters
        drift = to_tensors({n: c[n] - c_i[n] if n in c else none for n in names}, self.device)
        rows = self.rows(config)
        # y_i ← y_i − η_l (g_i(y_i) − c_i + c), line 10
        loss = self.fit_locally(config, rows=rows, drift=[*drift.values()])
        y_i = self.arrays()
        delta = {name: y_i[name] - x[name] for name in c}
        k_eta = np.float32(len(rows) * self.lr)
        # line 12, option II; without a step c_i stays
        c_plus = {n: c_i[n] - c[n] - delta[n] / k_eta for n in c} if len(rows) else c_i
        self.state |= prefixed("control", c_plus)
        reply = prefixed("delta", delta) | {n: a for n, a in y_i.items() if is_statistic(n, a)}
        reply |= prefixed("control", {n: c_plus[n] - c_i[n] for n in c})
        return reply, len(self.share.train), {"loss": loss}
