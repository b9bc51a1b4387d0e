"""BN-adapt client (Schneider et al., NeurIPS 2020): normalises by training and batch statistics.

μ = ρ μ_run + (1 − ρ) μ_batch, and the variances alike, with ρ = N / (N + n): N, `prior-samples`,
is the weight of the training statistics, n the batch size, also for a shorter batch. Layer by
layer: a layer's batch statistics are those of inputs that the adapted layers before it give. The
variance is unbiased, as in the authors' code. One value has no variance: with one value a channel
a layer keeps its running statistics. Agrees with the code of Bao et al. (NeurIPS 2023) to 1e-5
(tests/test_authors.py)."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clients.core.normalisation import check_norms
from clients.methods._batchwise import (
    STATISTICS,
    BatchwiseClient,
    Changes,
    batch_norms,
    before_norms,
    moments,
)
from fedapps.common.settings import NONNEGATIVE, setting
from partitions.datasets.loading import Info


class BNAdaptClient(BatchwiseClient):
    """FedAvg's client whose batch normalisation adapts to the inputs. The network must have some.

    With `prior_samples` = 0 batch statistics alone count."""

    prior_samples = setting(16.0, "N, samples that the training statistics count for", NONNEGATIVE)

    supports_streaming = True
    least = 0  # inputs that a shorter batch counts for

    @classmethod
    def build(cls, model: nn.Module, info: Info, /) -> nn.Module:
        """The network. ValueError if it has no batch normalisation."""
        check_norms("bn-adapt", model, batch_norms(model))
        return model

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C), each batch by its statistics."""
        self.least = 0 if self.online else self.prediction_batch
        logits = super().predict(x)
        self.least = 0
        return logits

    def changes(self, x: Tensor) -> Changes:
        """The statistics that are adapted to the batch x: means over its parts. In a stream the
        former ones take the place of the running ones, with the weight N + their inputs."""
        before = int(self.stream.get("count", 0))
        n, weight = max(len(x), self.least), self.prior_samples + before
        parts = [self._mixed(part, weight / (weight + n)) for part in self.parts(x)]
        mixed = {name: torch.stack([p[name] for p in parts]).mean(0) for name in parts[0]}
        self.stream = mixed | {"count": torch.tensor(before + n)}
        return mixed

    def _mixed(self, x: Tensor, rho: float) -> Changes:
        """ρ · former + (1 − ρ) · batch statistics, found layer by layer in one forward pass."""
        buffers = dict(self.model.eval().named_buffers()) | self.stream
        layers = batch_norms(self.model)
        mixed = {f"{n}.{s}": buffers[f"{n}.{s}"].clone() for n in layers for s in STATISTICS}

        def mix(name: str, norm: nn.Module, values: Tensor) -> None:
            if values.shape[1] > 1:
                for statistic, batch in zip(STATISTICS, moments(values), strict=True):
                    key = f"{name}.{statistic}"
                    mixed[key].copy_(rho * buffers[key] + (1 - rho) * batch)  # used at once

        with torch.no_grad(), before_norms(self.model, mix):
            functional_call(self.model, mixed, (x,))
        return mixed
