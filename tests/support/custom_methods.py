"""Methods from outside the package, by docs/how-to/own-method.md alone: FedDyn, and some that fail.

FedDyn (Acar et al., ICLR 2021, Algorithm 1)."""

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from clients.core.arrays import Arrays, group, prefixed, to_tensors
from clients.core.client import Client, Config, Metrics
from clients.core.protocol import StateUse
from fedapps.common.settings import setting
from fedapps.methods import Method
from strategies.core.aggregation import mean
from strategies.core.replies import Update
from strategies.methods.fedavg import FedAvg

ALPHA = setting(0.1, "α, weight of the regularizer", "(0, 100]")


class FedDynClient(Client):
    """θ_k = argmin L_k(θ) − ⟨∇L_k(θ_k), θ⟩ + (α/2)‖θ − θ^{t−1}‖²."""

    vmapped_tensors = ("server", "gradient")
    needs_state = StateUse.TRAINING
    alpha = ALPHA

    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        self.load(arrays)
        parameters = dict(self.model.named_parameters())
        zero = {name: np.zeros_like(arrays[name]) for name in parameters}
        g = group(self.state, "gradient") or zero  # ∇L_k(θ_k^{t−1})
        self.server = [p.detach().clone() for p in parameters.values()]
        self.gradient = [*to_tensors({n: g[n] for n in parameters}, self.device).values()]
        loss = self.fit_locally(config)
        theta = self.arrays()
        g = {n: g[n] - np.float32(self.alpha) * (theta[n] - arrays[n]) for n in parameters}
        self.state |= prefixed("gradient", g)
        return theta, len(self.share.train), {"loss": loss, "own-number": 10 + self.client}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        value = super().loss(x, y)
        for w, s, g in zip(self.model.parameters(), self.server, self.gradient, strict=True):
            value = value - (g * w).sum() + self.alpha / 2 * (w - s).square().sum()
        return value

    def predict(self, x: Tensor) -> Tensor:
        self.adaptation_metrics = {"own-score": self.client / 2}
        return super().predict(x)


class FedDynServer(FedAvg):
    """h ← h − (α/m) Σ_{k∈P} (θ_k − θ^{t−1}), θ^t = mean_{k∈P} θ_k − h/α."""

    persistent_attributes = ("h",)
    alpha = ALPHA

    def initialize(self, arrays: Arrays) -> Arrays:
        self.h = {name: np.zeros_like(a) for name, a in arrays.items()}
        return arrays

    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        alpha, theta = np.float32(self.alpha), mean([update.arrays for update in updates])
        share = np.float32(len(updates) / len(self.training_nodes()))
        self.h = {n: self.h[n] - alpha * share * (theta[n] - arrays[n]) for n in arrays}
        return {n: theta[n] - self.h[n] / alpha for n in arrays}


class Silent(FedDynClient):
    """It does not say what its loss reads."""

    vmapped_tensors = ()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y)


class FailsInLoss(FedDynClient):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise ArithmeticError(f"in loss of {self.client}, sample {y[0]}")


class FailsInPredict(FedDynClient):
    def predict(self, x: Tensor) -> Tensor:
        raise KeyError(f"in predict of {self.client}")


class FailsForNovel(FedDynClient):
    def predict(self, x: Tensor) -> Tensor:
        if self.share.novel:
            raise LookupError("in predict of a novel client")
        return super().predict(x)


class FailsInAggregate(FedDynServer):
    def aggregate(self, arrays: Arrays, updates: list[Update]) -> Arrays:
        raise ZeroDivisionError(f"h is {self.h}")


class Renames(Client):
    def train(self, arrays: Arrays, config: Config) -> tuple[Arrays, int, Metrics]:
        trained, count, metrics = super().train(arrays, config)
        return {name.replace("bias", "bais"): a for name, a in trained.items()}, count, metrics


PAPER = ("Acar et al., ICLR 2021", "every client's optimum is the federation's", "global")
FEDDYN = Method(FedDynServer, FedDynClient, *PAPER, name="FedDyn")
SAME_NAME = Method(FedAvg, FedDynClient, *PAPER, name="FedDyn")
SHIPPED_NAME = Method(FedAvg, FedDynClient, *PAPER, name="fedavg")
SILENT = Method(FedDynServer, Silent, *PAPER)
LOSS = Method(FedDynServer, FailsInLoss, *PAPER, dp=("local", "central"))
PREDICT = Method(FedDynServer, FailsInPredict, *PAPER)
NOVEL = Method(FedDynServer, FailsForNovel, *PAPER)
AGGREGATE = Method(FailsInAggregate, FedDynClient, *PAPER, dp=("local", "central"))
RENAMES = Method(FedAvg, Renames, *PAPER)


class SmoothedClient(Client):
    """A loss of its own, which serves classes alone, and no word about tasks."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y, label_smoothing=0.1)


SMOOTHED = Method(FedAvg, SmoothedClient, "mine", "smoothed labels", name="smoothed")
