"""T3A client (Iwasawa and Matsuo, NeurIPS 2021, Algorithm 1): adjusts class templates at test time.

The support set of class k starts with the classifier's normalised row ω_k. It gains the normalised
features of inputs that are predicted as k, and keeps the `supports` features of least entropy. The
logit of class k is the product of an input's features with the template c_k, the mean of the set.
No gradients and no labels are used.

c_k is the mean, as the paper prints it. The authors' code scales it to unit length
(`unit_templates`), which loses accuracy for training clients with few classes
(docs/results/digits.md). Departs from the paper: all inputs are one batch, which joins the sets
before any input is classified. Departs from the authors' code: ω_k belongs to class k even if the
classifier predicts another class for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.client import Client
from clients.core.evaluation import by_parts
from clients.core.layout import set_training
from clients.core.normalisation import entropies
from clients.models.head import head_of
from fedapps.common.settings import COUNT, setting
from fedapps.common.tasks import CLASSES


class T3AClient(Client):
    """FedAvg's client that, when scored, keeps at most `supports` features (M) for each class."""

    tasks = (CLASSES,)
    needs_head = True
    # Without a limit the stream would grow.
    supports_streaming = property(lambda self: self.supports > 0)

    supports = setting(20, "M, features kept for each class; 0: all", COUNT, evaluation=True)
    unit_templates = setting(
        False,
        "scale the class templates to unit length, as the authors' code does",
        evaluation=True,
    )

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.head = head_of(self.model)

    def predict(self, x: Tensor) -> Tensor:
        """z · c_k (n, C), c_k the template of class k."""
        self.stream = {}
        return self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """z · c_k (n, C) after x has joined the sets."""
        set_training(self.model, False)
        parts = self.parts(x)
        with torch.no_grad():
            with self.without_head():
                features = [self.model(part) for part in parts]
            self.join(torch.cat(features))
        return by_parts(partial(F.linear, weight=self.templates()), features)

    @contextmanager
    def without_head(self) -> Iterator[None]:
        """Within the context the network gives the features (n, d) before its head."""
        self.model.head = nn.Identity()
        try:
            yield
        finally:
            self.model.head = self.head

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network with the templates as its classifier."""
        model = super().personal_model(x)
        head = head_of(model)
        model.head = nn.Linear(head.in_features, head.out_features, bias=False)
        model.head.weight = nn.Parameter(self.templates())
        return model

    def join(self, z: Tensor) -> None:
        """Add features z (n, d) to the sets, each under the class that the classifier predicts."""
        num_classes = len(self.head.weight)
        supports = self.stream
        if not supports:
            classes = torch.arange(num_classes, device=z.device)
            supports = {"features": self.head.weight.detach(), "label": classes}  # all ω_k
        features = torch.cat([supports["features"], z])
        log_p = self.head(features).log_softmax(1)
        entropy = entropies(log_p)
        predicted = log_p[len(supports["label"]) :].argmax(1)
        label = torch.cat([supports["label"], predicted])
        counts = label.bincount(minlength=num_classes).tolist()
        kept = []
        for rows in label.argsort(stable=True).split(counts):  # those of class 0, 1, …
            by_entropy = rows[entropy[rows].argsort()]
            kept.append(by_entropy[: self.supports or len(rows)])
        kept_rows = torch.cat(kept)
        self.stream = {"features": features[kept_rows], "label": label[kept_rows]}

    def templates(self) -> Tensor:
        """c (C, d), the mean of each class's normalised features."""
        features = F.normalize(self.stream["features"])
        # The sets stand one after the other, by class.
        counts = self.stream["label"].bincount(minlength=len(self.head.weight)).tolist()
        c = torch.stack([members.mean(0) for members in features.split(counts)])
        if self.unit_templates:
            c = F.normalize(c)
        return c
