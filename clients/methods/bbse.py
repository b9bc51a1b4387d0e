"""BBSE client (Lipton, Wang and Smola, ICML 2018): label shift from a confusion matrix.

K is the confusion matrix over held-out samples of the training clients, K_ab = P(predicted a |
label b). m is the distribution of a batch's predictions, K⁺ the pseudo-inverse of K and Π the
projection on the simplex. The label distribution of the batch is q = (1 − ε) Π(K⁺ m) + ε / C. The
defaults are those in the code of Bao et al. (NeurIPS 2023).

Departs from the paper: inputs are predicted by z + log(q / π), without training again. Agrees with
that code to 1e-5 (tests/test_authors.py)."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from clients.core.arrays import Arrays
from clients.core.client import Config, Metrics
from clients.core.evaluation import by_parts
from clients.core.label_shift import bbse
from clients.methods._batchwise import HoldingOut
from clients.methods.prior_em import LabelShiftClient
from clients.models.head import head_of
from fedapps.common.settings import setting


class BBSEClient(LabelShiftClient, HoldingOut):
    """Estimates q from the server's confusion matrix and the distribution m of predictions.

    `predictions` counts predicted classes ("hard") or sums probabilities ("soft"). In a stream, m
    includes all previous inputs."""

    exchanges = ("query.confusion",)

    predictions = setting(
        "hard",
        "count predicted classes, or sum their probabilities",
        ("hard", "soft"),
        evaluation=True,
    )
    mixing = setting(0.001, "ε, weight of the uniform distribution in q", "(0, 1]", evaluation=True)

    def log_q(self, z: Tensor) -> Tensor:
        """log((1 − ε) Π(K⁺ m) + ε / C)."""
        k = self.known("confusion").astype(float)
        m_of_batch = self.shares(z).mean(0)
        m = self.mean_so_far({"m": m_of_batch}, len(z))["m"].cpu().numpy()
        q = bbse(k, m, self.mixing)
        return torch.from_numpy(np.log(q)).to(z)

    def shares(self, z: Tensor) -> Tensor:
        """Each prediction's distribution over the classes (n, C): one-hot or probabilities."""
        if self.predictions == "soft":
            return z.softmax(1)
        return F.one_hot(z.argmax(1), z.shape[1]).to(z)

    def confusion(self, arrays: Arrays, config: Config) -> tuple[Arrays, Metrics]:
        """Counts (C, C) of held-out samples by predicted class and label."""
        self.load(arrays)
        x, y = self.held.to(self.device)[:]
        shares = self.shares(by_parts(self.model.eval(), self.parts(x)))
        labels = F.one_hot(y, head_of(self.model).out_features).to(shares)
        return {"confusion": (shares.T @ labels).cpu().numpy()}, {}
