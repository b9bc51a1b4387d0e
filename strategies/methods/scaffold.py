"""SCAFFOLD server (Karimireddy et al., ICML 2020, Algorithm 1, lines 16-17).

x ← x + η_g mean(Δy_i), c ← c + (|S|/N) mean(Δc_i). With every reply valid, c = mean_i c_i over the
N training clients that were ever there; c_i = 0 for those that never trained. Departs from the
paper: running statistics are averaged. η_g does not decay with the other rates. Novel clients get
the global model.

A false c_i would distort every later round, because c accumulates its changes. The server therefore
sums each client's Δc_i to its c_i, and limits c_i to `max_update_ratio` times their usual norm."""

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
from strategies.core.strategy import PersonalizedStrategy


class Scaffold(PersonalizedStrategy):
    """`server_lr` is η_g. The server's arrays are the model and ``control/…``."""

    persistent_attributes = ("controls", "met")
    uses_late_replies = True
    requires = Requirement(
        "scaffold",
        "return changes of the model (`delta/…`) and of their control variates (`control/…`)",
        groups=("delta/", "control/"),
    )
    server_lr = setting(1.5, "η_g", POSITIVE)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.controls: dict[str, Arrays] = {}  # c_i by client id, unless max-update-ratio is 0
        self.met: list[int] = []  # ids of all training clients that were ever present

    def initialize(self, arrays: Arrays) -> Arrays:
        """The model with zero control variates."""
        controls = {}
        for name, array in arrays.items():
            if not is_statistic(name, array):
                controls[name] = np.zeros_like(array)
        return arrays | prefixed("control", controls)

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
        return prefixed("delta", c) | prefixed("control", c) | self.baseline_arrays(sent)

    def baseline_arrays(self, sent: Arrays) -> Arrays:
        """Changes are measured from zero."""
        return {name: a for name, a in sent.items() if is_statistic(name, a)}

    def rebased(self, arrays: Arrays, sent: Arrays, start: Arrays, weight: float) -> Arrays:
        """Δy_i shrinks by age, Δc_i does not: the client has changed its c_i by all of it."""
        whole = {name: a for name, a in arrays.items() if name.startswith("control/")}
        return super().rebased(arrays, sent, start, weight) | whole

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """Lines 16-17."""
        weights = bounded_weights([1.0] * len(updates), updates, self.max_examples_ratio)
        delta_y = weighted_mean([group(u.arrays, "delta") for u in updates], weights)
        # The limit lowers the weights of Δy alone: c must stay the plain mean of all c_i.
        delta_c = mean([group(u.arrays, "control") for u in updates])
        x = {name: arrays[name] + self.server_lr * change for name, change in delta_y.items()}
        c = self._control_of_all(group(arrays, "control"))
        share = len(updates) / len(self.met)  # |S|/N
        for name, change in delta_c.items():
            c[name] = c[name] + share * change
        if self.max_update_ratio > 0:
            for excess in self._excesses(updates):
                for name, cut_off in excess.items():
                    c[name] = c[name] - cut_off / len(self.met)
        return x | mean_statistics(updates) | prefixed("control", c)

    def _control_of_all(self, c: Arrays) -> Arrays:
        """c = mean_i c_i over all N training clients, including new ones, whose c_i is 0."""
        before = len(self.met)
        present = {node.client for node in self.training_nodes()}
        self.met = sorted(present.union(self.met))
        if before == 0 or len(self.met) == before:
            return c
        shrink = np.float32(before / len(self.met))
        return {name: array * shrink for name, array in c.items()}

    def _excesses(self, updates: list[Update]) -> list[Arrays]:
        """Add Δc_i to c_i, and shorten each c_i that is too long: the arrays that were cut off."""
        controls = dict(self.controls)
        for update in updates:
            client = str(update.node.client)
            delta_c_i = group(update.arrays, "control")
            c_i = controls.get(client)
            if c_i:
                delta_c_i = {name: np.asarray(c_i[name] + a) for name, a in delta_c_i.items()}
            controls[client] = delta_c_i
        self.controls = controls
        # The usual norm is an upper quartile, which says little of few clients.
        if len(controls) < MIN_REPLIES_FOR_QUARTILE:
            return []
        norms = {client: group_norms(c_i, {})[""] for client, c_i in controls.items()}
        max_norm = self.max_update_ratio * usual_size(norms.values())
        excesses = []
        for client, norm in norms.items():
            if 0 < max_norm < norm:
                factor = np.float32(max_norm / norm)
                c_i = controls[client]
                controls[client] = {name: np.asarray(a * factor) for name, a in c_i.items()}
                excesses.append({name: a - controls[client][name] for name, a in c_i.items()})
        return excesses
