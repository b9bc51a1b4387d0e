"""Central Adam on the users' mean change, and the heads that PFedKM's clusters share.

The server's half of the baselines *Global* and *Global+* (FedEmbed, section 4.1) and of FedEmbed:
per parameter the mean over all participants, applied as a gradient by Adam (Reddi et al., ICLR
2021, FedOpt, with Adam's bias correction)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from clients.arrays import Arrays, is_statistic, to_numpy
from clients.optimizers import Adam, Optimizer
from partitions.seeds import seed_of
from partitions.settings import POSITIVE, setting
from strategies import som
from strategies.base import PersonalizedStrategy
from strategies.fedavg import weighted_mean
from strategies.replies import Node, Requirement, Update


class CentralAdam(PersonalizedStrategy):
    """x ← Adam(x, −mean_u Δ_u) at the rate `server_lr`, betas and eps the library's.

    Running statistics and counters are the plain mean."""

    server_lr = setting(0.001, "learning rate of the central Adam on the mean change", POSITIVE)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._optimizer: Adam
        self._parameters: dict[str, nn.Parameter] = {}

    def initialize(self, arrays: Arrays) -> Arrays:
        """A fresh optimizer over the arrays."""
        self._parameters, self._optimizer = {}, Adam([], self.server_lr)
        self._track(arrays, arrays)
        return arrays

    def restore(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The same over the saved arrays."""
        return CentralAdam.initialize(self, super().restore(arrays, saved))

    def optimizers(self) -> list[Optimizer]:
        """The central one, over all arrays that there are."""
        self._track(self.arrays, self.arrays)
        return [self._optimizer]

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """One Adam step along the mean change; a user counts alike whatever its head."""
        return self.descend(arrays, weighted_mean([u.arrays for u in updates], [1] * len(updates)))

    def descend(self, arrays: Arrays, mean: Arrays) -> Arrays:
        """One Adam step with the gradient x − mean; arrays that are new start in it."""
        self._track(arrays, mean)
        for name, parameter in self._parameters.items():
            parameter.grad = torch.from_numpy(np.asarray(arrays[name] - mean[name]))
        self._optimizer.step(self.decay)
        statistics = {name: a for name, a in mean.items() if is_statistic(name, a)}
        return to_numpy(self._parameters) | statistics

    def _track(self, arrays: Arrays, names: Iterable[str]) -> None:
        """Let the optimizer move the arrays of these names, where it does not already."""
        new = [
            name
            for name in names
            if name not in self._parameters and not is_statistic(name, arrays[name])
        ]
        if new:
            found = {name: nn.Parameter(torch.from_numpy(arrays[name].copy())) for name in new}
            self._parameters |= found
            self._optimizer.add(found.values())


class Mapped(PersonalizedStrategy):
    """A strategy with a self-organizing map, whose rate and radius fall over the run."""

    som_rate = setting(0.5, "learning rate of the map, falling to som-rate-end", "(0, 1]")
    som_rate_end = setting(0.05, "learning rate of the map at the run's end", "(0, 1]")
    som_radius = setting(1.5, "neighbourhood radius in grid steps, falling", "(0, 1000]")
    som_radius_end = setting(0.3, "neighbourhood radius at the run's end", "(0, 1000]")

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.schedule = Schedule(
            self.som_rate, self.som_rate_end, self.som_radius, self.som_radius_end
        )


class PFedKM(Mapped, CentralAdam):
    """PFedKM (Tang et al., 2021) as FedEmbed ran it: a shared encoder, and heads shared within
    clusters of the users' gradients, found by a self-organizing map of `sub_populations` nodes.

    A user's gradient is the change of encoder and head that it sends; the map takes one pass over
    them each round. Users who have not taken part yet use head 0."""

    HEAD = "heads.0."
    requires = Requirement(
        "pfedkm",
        "train a network whose head is `heads.0.…`",
        groups=(HEAD,),
        fallback="CentralAdam",
        source="fedapps run --methods {}",
    )
    kept = ("gradients", "cluster")

    sub_populations = setting(10, "heads, and nodes of the map over gradients", "[1, 10000]")

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.positions = som.grid(self.sub_populations)
        self.gradients = np.zeros((0, 0))  # the map's nodes (K, parameters)
        self.cluster: dict[int, int] = {}  # head by client id

    def initialize(self, arrays: Arrays) -> Arrays:
        """The one head of the users' network, once for each cluster."""
        heads = {
            f"heads.{k}.{name.removeprefix(self.HEAD)}": array.copy()
            for name, array in arrays.items()
            if name.startswith(self.HEAD)
            for k in range(len(self.positions))
        }
        return super().initialize(arrays | heads)

    def personalize(self, arrays: Arrays, nodes: Sequence[Node]) -> dict[Node, Arrays]:
        """The encoder and the head of the node's cluster."""
        models = [self._model(arrays, k) for k in range(len(self.positions))]
        return {node: models[self.cluster.get(node.client, 0)] for node in nodes}

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        """Cluster the changes; a user's head change counts for its new cluster's head."""
        changes = []
        for update in updates:
            sent = self._model(arrays, self.cluster.get(update.node.client, 0))
            weights = {n: a for n, a in update.arrays.items() if not is_statistic(n, a)}
            changes.append({name: a - sent[name] for name, a in weights.items()})
        flat = np.stack([np.concatenate([a.ravel() for a in c.values()]) for c in changes])
        self._fit(flat)
        mean = {name: array.copy() for name, array in arrays.items()}
        clusters = som.best_matching(flat, self.gradients)
        for update, change, k in zip(updates, changes, clusters, strict=True):
            self.cluster[update.node.client] = int(k)
            for name, array in change.items():
                mean[name.replace(self.HEAD, f"heads.{k}.")] += array / len(updates)
        told = [{n: a for n, a in u.arrays.items() if is_statistic(n, a)} for u in updates]
        return self.descend(arrays, mean | weighted_mean(told, [1] * len(told)))

    def _model(self, arrays: Arrays, k: int) -> Arrays:
        """Encoder and head k, under the users' names."""
        shared = {name: a for name, a in arrays.items() if not name.startswith("heads.")}
        head = f"heads.{k}."
        own = {n.replace(head, self.HEAD): a for n, a in arrays.items() if n.startswith(head)}
        return shared | own

    def _fit(self, flat: np.ndarray) -> None:
        """One pass of the map over the gradients (n, parameters), in an order drawn by seed."""
        generator = np.random.default_rng(seed_of(self.seed, "som", self.round))
        if not self.gradients.size:
            count = len(self.positions)
            self.gradients = flat[generator.choice(len(flat), count, len(flat) < count)]
        pull = self.schedule.pull(self.positions, self.round / self.num_rounds).astype(flat.dtype)
        for row in generator.permutation(len(flat)):
            self.gradients = som.step(self.gradients, flat[row], pull)


class Schedule:
    """Rate and radius of a map, each from its start to its end by exponential decay."""

    def __init__(self, rate: float, rate_end: float, radius: float, radius_end: float) -> None:
        if not 0 < rate_end <= rate <= 1 or not 0 < radius_end <= radius:
            raise ValueError(
                f"som-rate falls from {rate} to {rate_end} and som-radius from {radius} to "
                f"{radius_end}; rates must lie in (0, 1], radii be positive, and neither may grow"
            )
        self.rate, self.radius = (rate, rate_end), (radius, radius_end)

    def pull(self, positions: np.ndarray, progress: float) -> np.ndarray:
        """rate × neighbourhood (K, K) at the progress in [0, 1] of the run."""
        rate, radius = (som.decayed(*pair, progress) for pair in (self.rate, self.radius))
        return rate * som.neighbourhood(positions, radius)
