"""T3A client (Iwasawa and Matsuo, NeurIPS 2021, Algorithm 1): adjusts class templates at test time.

The support set of class k starts with its normalised row ω_k of the classifier and gains the
normalised features of inputs predicted as k; the `supports` of least entropy stay. An input is
classified by its product with the mean of each set, scaled to unit length as in the authors' code.
The paper prints the mean itself: `unit_templates` = false. No gradients, no labels. Departs from
the paper: all inputs are one batch, which joins the sets before any of it is classified. Departs
from the authors' code: ω_k counts for class k even if the classifier predicts another for it."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clients.base import Client
from clients.models.head import head_of
from clients.scoring import by_parts
from partitions.settings import COUNT, setting


class T3AClient(Client):
    """FedAvg's client that, when scored, keeps at most `supports` of each class (M; 0: all)."""

    needs_head = True

    supports = setting(20, "M, features kept for each class; 0: all", COUNT)
    unit_templates = setting(True, "templates of unit length, as in the authors' code, or means")

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.head = head_of(self.model)

    def predict(self, x: Tensor) -> Tensor:
        """z · c_k (n, C), c_k the template of class k."""
        return by_parts(self.personal_model(x), self.parts(x))

    def personal_model(self, x: Tensor) -> nn.Module:
        """The network with the templates of x as its classifier."""
        model = deepcopy(self.model).eval()
        head = head_of(model)
        model.head = nn.Identity()
        features = by_parts(model, self.parts(x))
        with torch.no_grad():
            templates = self.templates(features)
        model.head = nn.Linear(head.in_features, head.out_features, bias=False)
        model.head.weight = nn.Parameter(templates)
        return model

    def templates(self, z: Tensor) -> Tensor:
        """c (C, d) from features z (n, d)."""
        every = torch.cat([self.head.weight, z])  # first the classifier's rows
        log_p = self.head(every).log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1)
        classes = torch.arange(len(self.head.weight), device=z.device)
        label = torch.cat([classes, log_p[len(classes) :].argmax(1)])
        means = []
        for k in classes:
            rows = torch.nonzero(label == k)[:, 0]
            kept = rows[entropy[rows].argsort()[: self.supports or len(rows)]]
            means.append(F.normalize(every[kept]).mean(0))
        c = torch.stack(means)
        return F.normalize(c) if self.unit_templates else c
