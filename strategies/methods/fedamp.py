"""FedAMP server (Huang et al., AAAI 2021, Algorithm 1): clients of similar models help each other.

u_i = Σ_j ξ_ij w_j with ξ_ij = α A'(‖w_i − w_j‖²) for j ≠ i, ξ_ii = 1 − Σ_j≠i ξ_ij and
A(x) = 1 − e^(−x/σ), Eq. (5)-(6). Departs from the paper: ξ_ij whose sum exceeds 1 are scaled to
it. With partial participation, w_j are the models that clients have uploaded so far; a client that
has uploaded no model starts from the initial one."""

from collections.abc import Sequence

import numpy as np

from clients.core.arrays import Arrays, group, is_statistic, prefixed, wide
from fedapps.common.settings import RATE, setting
from strategies.core.aggregation import weighted_mean
from strategies.core.replies import Node, Requirement, Update
from strategies.core.strategy import PersonalizedStrategy


class FedAMP(PersonalizedStrategy):
    """`step` is α, `width` is σ. The server's arrays are ``initial/…`` and ``<client>/…``, w_i."""

    keeps_arrays = True
    requires = Requirement("fedamp", "have a proximal term", ("proximal",), "FedAMP without one")

    step = setting(1.0, "α, step of the messages' weights", RATE)
    width = setting(10.0, "σ, width of squared distances between models", "(0, 1000000]")

    def initialize(self, arrays: Arrays) -> Arrays:
        """The initial model, which novel clients get."""
        return prefixed("initial", arrays)

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """With the saved models of the clients."""
        return arrays | saved

    def known_clients(self) -> set[int]:
        """Those whose model is stored."""
        names = {name.partition("/")[0] for name in self.arrays}
        return {int(name) for name in names if name.isdecimal()}

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """w_i, the client's last trained model."""
        first = group(arrays, "initial")
        models = {}
        for node in nodes:
            models[node] = group(arrays, str(node.client)) or first
        return models

    def broadcast(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """u_i over the uploaded models; integer arrays and statistics stay those of w_i."""
        uploaded = {}
        for node in self.training_nodes():
            model = group(arrays, str(node.client))
            if model:
                uploaded[node.client] = model
        clouds = {}
        for node, w_i in self.personalize(arrays, nodes).items():
            clouds[node] = self.cloud(node.client, uploaded | {node.client: w_i})
        return clouds

    def cloud(self, client: int, w: dict[int, Arrays]) -> Arrays:
        """u_i, Eq. (5), from the models w_j by client."""
        w_i = w[client]
        others = [w_j for j, w_j in w.items() if j != client]
        # Running statistics are no weights: they neither count as distance nor are mixed.
        names = [name for name, array in w_i.items() if not is_statistic(name, array)]
        d = np.array([_squared_distance(w_i, w_j, names) for w_j in others])
        xi = self.step * np.exp(-d / self.width) / self.width  # α A'(d)
        xi = xi / max(1.0, xi.sum())  # ξ_ii is then not negative
        models = []
        for model in (w_i, *others):
            models.append({name: model[name] for name in names})
        return w_i | weighted_mean(models, [1 - xi.sum(), *xi])

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """Store the trained models."""
        stored = dict(arrays)
        for update in updates:
            stored |= prefixed(str(update.node.client), update.arrays)
        return stored


def _squared_distance(w_i: Arrays, w_j: Arrays, names: Sequence[str]) -> float:
    """‖w_i − w_j‖² over the arrays of these names."""
    return sum(float(np.square(wide(w_i[name]) - w_j[name]).sum()) for name in names)
