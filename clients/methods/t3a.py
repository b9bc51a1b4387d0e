"""T3A client (Iwasawa and Matsuo, NeurIPS 2021, Algorithm 1): adjusts class templates at test time.

The support set of class k starts with its normalised row ω_k of the classifier and gains the
normalised features of inputs predicted as k; the `supports` of least entropy stay. An input is
classified by its product with the mean of each set, scaled to unit length as in the authors' code.
The paper prints the mean itself: `unit_templates` = false. No gradients, no labels. Departs from
the paper: all inputs are one batch, which joins the sets before any of it is classified. Departs
from the authors' code: ω_k counts for class k even if the classifier predicts another for it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.client import Client
from clients.core.evaluation import by_parts
from clients.core.normalisation import entropies
from clients.models.head import head_of
from fedapps.common.settings import COUNT, setting


class T3AClient(Client):
    """FedAvg's client that, when scored, keeps at most `supports` of each class (M; 0: all)."""

    needs_head = True
    supports_streaming = property(lambda self: self.supports > 0)  # others would grow

    supports = setting(20, "M, features kept for each class; 0: all", COUNT)
    unit_templates = setting(True, "templates of unit length, as in the authors' code, or means")

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.head = head_of(self.model)

    def predict(self, x: Tensor) -> Tensor:
        """z · c_k (n, C), c_k the template of class k."""
        self.stream = {}
        return self.update(x)

    def update(self, x: Tensor) -> Tensor:
        """z · c_k (n, C) after x has joined the sets."""
        body = super().personal_model(x)
        body.head = nn.Identity()
        with torch.no_grad():
            self.join(by_parts(body, self.parts(x)))
        return by_parts(self.personal_model(x), self.parts(x))

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network with the templates as its classifier."""
        model = super().personal_model(x)
        head = head_of(model)
        model.head = nn.Linear(head.in_features, head.out_features, bias=False)
        model.head.weight = nn.Parameter(self.templates())
        return model

    def join(self, z: Tensor) -> None:
        """Add features z (n, d) to the sets, each under the class that the classifier predicts."""
        classes = torch.arange(len(self.head.weight), device=z.device)
        first = {"features": self.head.weight.detach(), "label": classes}  # the classifier's rows
        former = self.stream or first
        every = torch.cat([former["features"], z])
        log_p = self.head(every).log_softmax(1)
        entropy = entropies(log_p)
        label = torch.cat([former["label"], log_p[len(every) - len(z) :].argmax(1)])
        kept = []
        for k in classes:
            rows = torch.nonzero(label == k)[:, 0]
            kept.append(rows[entropy[rows].argsort()[: self.supports or len(rows)]])
        rows = torch.cat(kept)
        self.stream = {"features": every[rows], "label": label[rows]}

    def templates(self) -> Tensor:
        """c (C, d)."""
        z, label = self.stream["features"], self.stream["label"]
        sets = [z[label == k] for k in range(len(self.head.weight))]
        c = torch.stack([F.normalize(z_k).mean(0) for z_k in sets])
        return F.normalize(c) if self.unit_templates else c
