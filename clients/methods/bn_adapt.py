"""BN-adapt client (Schneider et al., NeurIPS 2020): normalises by training and batch statistics.

μ = ρ μ_run + (1 − ρ) μ_batch with ρ = N / (N + n), and likewise for the variance. N is
`prior-samples`, the weight of the training statistics. n is the batch size, also for a last batch
that is smaller. A layer's batch statistics are taken behind the layers that are adapted before it.
The variance is unbiased, as in the authors' code. A layer with one value for a channel, which has
no variance, keeps its running statistics.

Agrees with the code of Bao et al. (NeurIPS 2023) to 1e-5 (tests/test_authors.py)."""

import torch
from torch import Tensor, nn

from clients.core.normalisation import check_norms
from clients.methods._batchwise import (
    BatchwiseClient,
    Changes,
    batch_norms,
    check_own_statistics,
    mixed_statistics,
)
from fedapps.common.settings import NONNEGATIVE, setting
from partitions.datasets.loading import Info


class BNAdaptClient(BatchwiseClient):
    """FedAvg's client whose batch normalisation layers adapt to the inputs.

    The network must have such layers. With `prior_samples` = 0, only batch statistics are used."""

    prior_samples = setting(
        16.0,
        "N, weight of the training statistics in numbers of samples",
        NONNEGATIVE,
        evaluation=True,
    )

    supports_streaming = True
    # A smaller batch is weighted like a batch of this size.
    least_weight = 0

    @classmethod
    def build(cls, model: nn.Module, info: Info, /) -> nn.Module:
        """The network. Raises ValueError if it has no batch normalisation, and if two layers hold
        the same statistics."""
        check_norms("bn-adapt", model, batch_norms(model))
        check_own_statistics("bn-adapt", model)
        return model

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C), each batch by the statistics that are adapted to it."""
        if not self.online:
            self.least_weight = self.prediction_batch
        logits = super().predict(x)
        self.least_weight = 0
        return logits

    def changes(self, x: Tensor) -> Changes:
        """The statistics that are adapted to the batch x: means over its parts.

        In a stream, the previous statistics replace the training statistics. Their weight is N
        plus the number of previous inputs."""
        count_before = int(self.stream.get("count", 0))
        n = max(len(x), self.least_weight)
        weight = self.prior_samples + count_before
        rho = weight / (weight + n)
        statistics_of_parts = [self._mixed_statistics(part, rho) for part in self.parts(x)]
        mixed: Changes = {}
        for name in statistics_of_parts[0]:
            values = [statistics[name] for statistics in statistics_of_parts]
            mixed[name] = torch.stack(values).mean(0)
        self.stream = mixed | {"count": torch.tensor(count_before + n)}
        return mixed

    def _mixed_statistics(self, x: Tensor, rho: float) -> Changes:
        """ρ · previous + (1 − ρ) · batch statistics, layer by layer in one forward pass."""
        previous = dict(self.model.eval().named_buffers()) | self.stream
        return mixed_statistics(self.model, previous, x, rho)[0]
