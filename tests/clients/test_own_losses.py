"""A user's loss that is no mean, or has no gradient, is told of before the training."""

import logging

import pytest
import torch
from component_runs import run_components
from torch import nn
from torch.nn import functional as F

from clients.core.criterion import OwnLoss, check_own_loss
from fedapps.common import once


def focal(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def accuracy(logits, labels):
    return (logits.argmax(1) != labels).float().mean()


def of_three_classes(logits, labels):
    return F.cross_entropy(logits, labels, weight=torch.ones(3))


def tried(loss, task, num_outputs):
    check_own_loss(OwnLoss(loss, task), task, num_outputs, "cpu")


@pytest.mark.parametrize(
    ("loss", "task", "num_outputs", "is_sum"),
    [
        (nn.CrossEntropyLoss(), "classes", 3, False),
        (nn.CrossEntropyLoss(reduction="sum"), "classes", 3, True),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), "classes", 3, False),
        (focal, "classes", 3, False),
        (nn.BCEWithLogitsLoss(), "binary", 1, False),
        (nn.BCEWithLogitsLoss(reduction="sum"), "binary", 1, True),
        (nn.BCEWithLogitsLoss(reduction="sum"), "labels", 4, True),
        (nn.HuberLoss(), "values", 2, False),
        (lambda output, y: ((output - y) ** 2).sum(), "values", 2, True),
        (of_three_classes, "classes", 4, False),  # the data will say what is wrong
    ],
)
def test_a_sum_over_samples_is_said(loss, task, num_outputs, is_sum, caplog, monkeypatch):
    """Each sample twice: the mean stays, the sum doubles."""
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    tried(loss, task, num_outputs)
    assert ("loss= seems to be the sum over the samples" in caplog.text) == is_sum


def test_a_loss_without_a_gradient_is_refused_before_the_training():
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    with pytest.raises(RuntimeError, match=r"no client could start.*a number without a gradient"):
        run_components("fedavg", lambda: nn.Linear(3, 2), ((x, y), (x, y)), (3,), loss=accuracy)
