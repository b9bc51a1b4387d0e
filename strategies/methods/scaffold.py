"""SCAFFOLD server (Karimireddy et al., ICML 2020, Algorithm 1, lines 16-17).

x ← x + η_g mean(Δy_i), c ← c + (|S|/N) mean(Δc_i). With every reply valid, c = mean_i c_i over the
N training clients that were ever there; c_i = 0 for those that never trained. Departs from the
paper: running statistics are averaged. η_g does not decay with the other rates. Novel clients get
the global model.

A false c_i would drag every later round, as changes of it add up. The server therefore holds the
c_i that replies add up to, and limits each to `max_update_ratio` times the usual norm of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clients.core.arrays import Arrays, group, is_statistic, prefixed
from fedapps.common.settings import POSITIVE, setting
from strategies.core.aggregation import mean, mean_statistics, weighted_mean
from strategies.core.limits import (
    MIN_REPLIES_FOR_QUARTILE,
    bounded_weights,
    group_norms,
    usual_size,
)
from strategies.core.replies import Node, Requirement, Update
from strategies.core.rounds import PersonalizedStrategy


class Scaffold(PersonalizedStrategy):
    """`server_lr` is η_g. The server's arrays are the model and ``control/…``."""

    persistent_attributes = ("controls", "met")
    requires = Requirement(
        "scaffold",
        "return changes of the model (`delta/…`) and of their control variates (`control/…`)",
        groups=("delta/", "control/"),
    )
    server_lr = setting(1.5, "η_g", POSITIVE)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.controls: dict[str, Arrays] = {}  # c_i by client id, unless max-update-ratio is 0
        self.met: list[int] = []  # ids of the training clients that were ever there

    def initialize(self, arrays: Arrays) -> Arrays:
        """The model with zero control variates."""
        weights = {name: a for name, a in arrays.items() if not is_statistic(name, a)}
        return arrays | prefixed("control", {n: np.zeros_like(a) for n, a in weights.items()})

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The global model, without the control variates."""
        model = {name: a for name, a in arrays.items() if not name.startswith("control/")}
        return dict.fromkeys(nodes, model)

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The model and c."""
        return dict.fromkeys(nodes, arrays)

    def expected(self, sent: Arrays) -> Arrays:
        """``delta/…`` and ``control/…`` for every weight, and statistics."""
        c = group(sent, "control")
        statistics = self.baseline_arrays(sent)
        return prefixed("delta", c) | prefixed("control", c) | statistics

    def baseline_arrays(self, sent: Arrays) -> Arrays:
        """Changes are measured from zero."""
        return {name: a for name, a in sent.items() if is_statistic(name, a)}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """Lines 16-17."""
        weights = bounded_weights([1.0] * len(updates), updates, self.max_examples_ratio)
        delta_y = weighted_mean([group(u.arrays, "delta") for u in updates], weights)
        delta_c = mean([group(u.arrays, "control") for u in updates])
        c, before = group(arrays, "control"), len(self.met)
        self.met = sorted({*self.met, *(node.client for node in self.training_nodes())})
        if before and (n := len(self.met)) > before:
            c = {name: a * np.float32(before / n) for name, a in c.items()}
        share = len(updates) / len(self.met)  # |S|/N
        x = {name: arrays[name] + self.server_lr * delta_y[name] for name in delta_y}
        c = {name: c[name] + share * delta_c[name] for name in c}
        for excess in self._excesses(updates) if self.max_update_ratio else ():
            c = {name: a - excess[name] / len(self.met) for name, a in c.items()}
        return x | mean_statistics(updates) | prefixed("control", c)

    def _excesses(self, updates: list[Update]) -> list[Arrays]:
        """Add Δc_i to c_i; what is then cut off from each c_i that is too long."""
        controls, excesses = dict(self.controls), []
        for update in updates:
            change, client = group(update.arrays, "control"), str(update.node.client)
            before = controls.get(client, {})
            controls[client] = {
                n: np.asarray(before[n] + a) if before else a for n, a in change.items()
            }
        norms = {client: group_norms(c_i, {})[""] for client, c_i in controls.items()}
        most = self.max_update_ratio * usual_size(norms.values())
        for client, norm in norms.items() if len(norms) >= MIN_REPLIES_FOR_QUARTILE else ():
            if 0 < most < norm:
                c_i, factor = controls[client], np.float32(most / norm)
                controls[client] = {n: np.asarray(a * factor) for n, a in c_i.items()}
                excesses.append({n: a - controls[client][n] for n, a in c_i.items()})
        self.controls = controls
        return excesses
