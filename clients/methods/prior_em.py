"""Prior-EM client (Saerens, Latinne and Decaestecker, Neural Computation 2002): label shift by EM.

p_ic is the network's probability of class c for input i, π the training prior, and q the label
distribution of the inputs, which starts at π. Each step sets q to mean_i r_i with r_ic ∝
(q_c / π_c) p_ic, which never lowers Σ_i log Σ_c (q_c / π_c) p_ic. An input is predicted by
z + log(q / π).

The defaults are those in the code of Bao et al. (NeurIPS 2023): two steps, batches of 20, and a
uniform π. The paper's π is `source-prior` = "training", for which training clients reveal their
label counts. Agrees with that code to 1e-5 (tests/test_authors.py)."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from clients.core.arrays import Arrays, group
from clients.core.client import Client, Config, Metrics
from clients.core.label_shift import log_q_by_em
from clients.methods._batchwise import BatchwiseClient
from clients.models.head import head_of
from fedapps.common.settings import COUNT, setting
from fedapps.common.tasks import CLASSES

SOURCE = "source"  # group of arrays: the server's statistics of the training clients' labels
SOURCE_PRIOR = setting(
    "uniform",
    "π, the training clients' label distribution",
    ("uniform", "training"),
    evaluation=True,
)


class LabelShiftClient(BatchwiseClient):
    """FedAvg's client that adds log(q / π) to the logits, with q from each batch of inputs.

    In a served network, log(q / π) is part of the bias of the head."""

    tasks = (CLASSES,)
    supports_streaming = True
    needs_head = True
    exchanges = ("query.labels",)

    source_prior = SOURCE_PRIOR

    def log_q(self, z: Tensor) -> Tensor:
        """log q (C,) from the logits (n, C) of the stream's next batch."""
        raise NotImplementedError

    @property
    def log_prior(self) -> Tensor:
        """log π (C,)."""
        classes = head_of(self.model).out_features
        if self.source_prior == "uniform":
            return torch.full((classes,), -math.log(classes), device=self.device)
        return torch.tensor(self.known("prior"), device=self.device).log()

    def known(self, name: str) -> np.ndarray:
        """The array `name` of `source`. Raises ValueError if the server has not sent it."""
        if name not in self.source:
            raise ValueError(
                f"the server has no {name}: no training client has answered what it asks"
            )
        return self.source[name]

    def receive(self, arrays: Arrays, config: Config) -> None:
        """Load the model; keep the server's statistics of the training clients' labels."""
        self.source = group(arrays, SOURCE)
        network = {name: a for name, a in arrays.items() if not name.startswith(f"{SOURCE}/")}
        super().receive(network, config)

    def predict(self, x: Tensor) -> Tensor:
        """Logits (n, C), those of each batch corrected by its q."""
        base = Client.predict(self, x)
        self.intermediate_logits = {"base": base}
        return torch.cat([self.corrected(z) for z in self.test_batches(base)])

    def update(self, x: Tensor) -> Tensor:
        """Logits (n, C) of the next batch, corrected by q."""
        return self.corrected(Client.predict(self, x))

    def corrected(self, z: Tensor) -> Tensor:
        """Logits (n, C) of the next batch from those of the network."""
        self._ratio = self.log_q(z) - self.log_prior
        return z + self._ratio

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network, with the last log(q / π) added to the bias of its head."""
        model = Client.personal_model(self, x)
        head = head_of(model)
        bias = self._ratio
        if head.bias is not None:
            bias = head.bias.detach() + bias
        head.bias = nn.Parameter(bias)
        return model

    def labels(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """The label counts (C,) of the training samples."""
        _, y = self.share.train[:]
        counts = y.bincount(minlength=head_of(self.model).out_features)
        return {"labels": counts.float().cpu().numpy()}, {}


class PriorEMClient(LabelShiftClient):
    """Estimates q by `em_steps` steps of EM; 0: q = π, which is FedAvg.

    In a stream, which is ours, q is the mean of the batches' q, weighted by their inputs."""

    em_steps = setting(2, "EM steps", COUNT, evaluation=True)

    def log_q(self, z: Tensor) -> Tensor:
        """log q (C,) after the steps; in a stream the mean over its batches."""
        n = len(z)
        log_q = log_q_by_em(z.log_softmax(1), self.log_prior, self.em_steps)
        # The mean over the stream: (n q + n_before q_before) / (n + n_before).
        n_before = int(self.stream.get("count", 0))
        if n_before:
            log_previous_sum = self.stream["log_q"] + math.log(n_before)
            log_sum = (log_q + math.log(n)).logaddexp(log_previous_sum)
            log_q = log_sum - math.log(n_before + n)
        self.stream = {"log_q": log_q, "count": torch.tensor(n_before + n)}
        return log_q
