"""SCAFFOLD client (Karimireddy et al., ICML 2020, Algorithm 1, lines 7-15).

x is the server's model, y_i the client's, c the server's control variate and c_i the client's. The
client keeps c_i in its state, also over rounds in which it does not train. Control variates use
option II. Departs from the paper: running statistics of normalisation layers are averaged."""

from typing import Any

import numpy as np
from torch import Tensor

from clients.core.arrays import Arrays, group, is_statistic, prefixed, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.protocol import StateUse

NO_DRIFT = np.zeros(1, np.float32)  # for a frozen parameter, which has no control variate


class ScaffoldClient(Client):
    """Local SGD corrected by c − c_i. No momentum: option II divides by K·η_l."""

    needs_state = StateUse.TRAINING

    lr = 0.1  # η_l

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.momentum:
            raise ValueError(f"momentum is {self.momentum}; SCAFFOLD's control variates need 0")
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; SCAFFOLD's control variates need more than 0")

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        """Returns Δy_i as ``delta/…``, Δc_i as ``control/…`` and the running statistics."""
        c = group(arrays, "control")
        x = {name: a for name, a in arrays.items() if not name.startswith("control/")}
        c_i = {name: np.zeros_like(a) for name, a in c.items()}
        c_i |= group(self.state, "control")

        # y_i ← y_i − η_l (g_i(y_i) − c_i + c), line 10
        self.load(x)
        drift = self.drift(c, c_i)
        rows = self.rows(config)
        loss = self.fit_locally(config, rows=rows, drift=drift)
        y_i = self.arrays()

        delta_y: Arrays = {}
        delta_c: Arrays = {}
        c_plus = dict(c_i)
        k_eta = np.float32(len(rows) * self.lr)  # K·η_l
        for name in c:
            delta_y[name] = y_i[name] - x[name]
            if len(rows):  # without a step c_i stays as it is
                c_plus[name] = c_i[name] - c[name] - delta_y[name] / k_eta  # line 12, option II
            delta_c[name] = c_plus[name] - c_i[name]

        self.state |= prefixed("control", c_plus)
        reply = prefixed("delta", delta_y)
        reply |= {name: a for name, a in y_i.items() if is_statistic(name, a)}
        reply |= prefixed("control", delta_c)
        return reply, len(self.share.train), {"loss": loss}

    def drift(self, c: Arrays, c_i: Arrays) -> list[Tensor]:
        """c − c_i for each parameter of the model."""
        drift: Arrays = {}
        for name, _ in self.model.named_parameters():
            drift[name] = c[name] - c_i[name] if name in c else NO_DRIFT
        return list(to_tensors(drift, self.device).values())
