"""Central Adam on the users' mean change, and PFedKM, whose clusters of users share heads.

Central Adam is the server of FedEmbed and of its baselines *Global* and *Global+* (section 4.1):
Adam takes the mean change of all participants as a gradient (Reddi et al., ICLR 2021, FedOpt, with
bias correction)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from clients.core.arrays import Arrays, as_type, is_statistic, to_numpy, wide
from clients.core.sgd import Adam, Optimizer
from fedapps.common.seeds import seed_of
from fedapps.common.settings import POSITIVE, setting
from strategies.core.aggregation import mean
from strategies.core.replies import Node, Requirement, Update
from strategies.core.strategy import PersonalizedStrategy
from strategies.maths import som


class CentralAdam(PersonalizedStrategy):
    """x ← Adam(x, −mean_u Δ_u) at the rate `server_lr`, betas and eps the library's.

    Running statistics and counters are the plain mean."""

    treats_statistics_apart = True

    server_lr = setting(0.001, "learning rate of the central Adam on the mean change", POSITIVE)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._optimizer: Adam
        self._parameters: dict[str, nn.Parameter] = {}

    def initialize(self, arrays: Arrays) -> Arrays:
        """A fresh optimizer over the arrays."""
        self._parameters = {}
        self._optimizer = Adam([], self.server_lr)
        self._track(arrays, arrays)
        return arrays

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The saved arrays, with a fresh optimizer."""
        return CentralAdam.initialize(self, super().restore(arrays, saved))

    def optimizers(self) -> list[Optimizer]:
        """The central Adam, over all present arrays."""
        self._track(self.arrays, self.arrays)
        return [self._optimizer]

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """One Adam step along the mean change over all users."""
        return self.descend(arrays, mean([update.arrays for update in updates]))

    def descend(self, arrays: Arrays, average: Arrays) -> Arrays:
        """One Adam step with the gradient x − average. The optimizer adopts arrays that are new in
        `average`; statistics become those of `average`."""
        self._track(arrays, average)
        for name, parameter in self._parameters.items():
            parameter.grad = torch.from_numpy(np.asarray(arrays[name] - average[name]))
        self._optimizer.step(self.decay)
        return to_numpy(self._parameters) | _statistics(average)

    def _track(self, arrays: Arrays, names: Iterable[str]) -> None:
        """Add the arrays of these names to the optimizer, where they are missing."""
        added = {}
        for name in names:
            if name not in self._parameters and not is_statistic(name, arrays[name]):
                added[name] = nn.Parameter(torch.from_numpy(arrays[name].copy()))
        if added:
            self._parameters |= added
            self._optimizer.add(added.values())


class WithSelfOrganizingMap(PersonalizedStrategy):
    """A strategy with a self-organizing map, whose learning rate and radius decay over the run."""

    som_rate = setting(0.5, "learning rate of the map at the run's start", "(0, 1]")
    som_rate_end = setting(0.05, "learning rate of the map at the run's end", "(0, 1]")
    som_radius = setting(1.5, "neighbourhood radius at the run's start, in grid steps", "(0, 1000]")
    som_radius_end = setting(0.3, "neighbourhood radius at the run's end", "(0, 1000]")

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.som_rate_end > self.som_rate or self.som_radius_end > self.som_radius:
            raise ValueError(
                f"som-rate falls from {self.som_rate} to {self.som_rate_end} and som-radius from "
                f"{self.som_radius} to {self.som_radius_end}; neither may grow"
            )

    def pull(self, positions: np.ndarray, progress: float) -> np.ndarray:
        """rate × neighbourhood (K, K) at the progress in [0, 1] of the run."""
        rate = som.decayed(self.som_rate, self.som_rate_end, progress)
        radius = som.decayed(self.som_radius, self.som_radius_end, progress)
        return rate * som.neighbourhood(positions, radius)


class PFedKM(WithSelfOrganizingMap, CentralAdam):
    """PFedKM (Tang et al., 2021) as in FedEmbed: a shared encoder, and a head for each cluster of
    the users' gradients, found by a self-organizing map of `sub_populations` nodes.

    A gradient is the change of encoder and head that a user sends. The map takes one pass over all
    gradients each round. Users that have not trained yet use head 0."""

    HEAD = "heads.0."
    requires = Requirement(
        "pfedkm",
        "train a network whose head is `heads.0.…`",
        groups=(HEAD,),
        fallback="CentralAdam",
        source="fedapps run --methods {}",
    )
    persistent_attributes = ("gradients", "cluster")

    sub_populations = setting(10, "heads, and nodes of the map over gradients", "[1, 10000]")

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.positions = som.grid(self.sub_populations)
        self.gradients = np.zeros((0, 0))  # the map's nodes (K, parameters)
        self.cluster: dict[int, int] = {}  # head by client id

    def initialize(self, arrays: Arrays) -> Arrays:
        """A copy of the network's head for each cluster."""
        heads = {}
        for name, array in arrays.items():
            if name.startswith(self.HEAD):
                for k in range(len(self.positions)):
                    heads[f"heads.{k}.{name.removeprefix(self.HEAD)}"] = array.copy()
        return super().initialize(arrays | heads)

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The encoder and the head of the node's cluster."""
        models = [self._model(arrays, k) for k in range(len(self.positions))]
        return {node: models[self.cluster.get(node.client, 0)] for node in nodes}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """Cluster the changes; a user changes the head of its new cluster."""
        changes = [self._change(arrays, update) for update in updates]
        gradients = np.stack([_flat(change) for change in changes])
        self._fit(gradients)
        clusters = som.best_matching(gradients, self.gradients)
        # The server's arrays plus the mean change; heads of other clusters change by zero.
        moved = {name: wide(array).copy() for name, array in arrays.items()}
        for update, change, k in zip(updates, changes, clusters, strict=True):
            self.cluster[update.node.client] = int(k)
            for name, array in change.items():
                # A user knows its head as `heads.0.…`, whichever it is on the server.
                server_name = name.replace(self.HEAD, f"heads.{k}.")
                moved[server_name] += array / len(updates)
        for name, array in moved.items():
            moved[name] = as_type(array, arrays[name].dtype)
        statistics = [_statistics(update.arrays) for update in updates]
        return self.descend(arrays, moved | mean(statistics))

    def _change(self, arrays: Arrays, update: Update) -> Arrays:
        """A user's change of encoder and head, under the user's names, in float32 at least."""
        sent = self._model(arrays, self.cluster.get(update.node.client, 0))
        change = {}
        for name, array in update.arrays.items():
            if not is_statistic(name, array):
                change[name] = wide(array) - sent[name]
        return change

    def _model(self, arrays: Arrays, k: int) -> Arrays:
        """Encoder and head k, under the users' names."""
        model = {name: a for name, a in arrays.items() if not name.startswith("heads.")}
        head = f"heads.{k}."
        for name, array in arrays.items():
            if name.startswith(head):
                model[name.replace(head, self.HEAD)] = array
        return model

    def _fit(self, gradients: np.ndarray) -> None:
        """One pass of the map over the gradients (n, parameters), in an order drawn by seed."""
        generator = np.random.default_rng(seed_of(self.seed, "som", self.round))
        if not self.gradients.size:
            # The nodes start at drawn gradients, which repeat if there are fewer than nodes.
            count = len(self.positions)
            repeats = len(gradients) < count
            self.gradients = gradients[generator.choice(len(gradients), count, repeats)]
        pull = self.pull(self.positions, self.round / self.num_rounds).astype(gradients.dtype)
        for row in generator.permutation(len(gradients)):
            self.gradients = som.step(self.gradients, gradients[row], pull)


def _flat(change: Arrays) -> np.ndarray:
    """All entries (parameters,) of a user's change."""
    return np.concatenate([array.ravel() for array in change.values()])


def _statistics(arrays: Arrays) -> Arrays:
    """The running statistics and counters among the arrays."""
    return {name: array for name, array in arrays.items() if is_statistic(name, array)}
