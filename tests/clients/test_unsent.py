"""What a network keeps where no message carries it is said."""

import logging

import pytest
import torch
from component_runs import run_components
from torch import nn

from clients.models.foreign import adopted
from clients.models.unsent import warn_of_unsent
from fedapps.building import method_model
from fedapps.common import once
from fedapps.settings.config import defaults
from partitions.datasets.catalog import Info


class Kept(nn.Linear):
    """A running mean of the inputs, in the place that `keep` chooses."""

    def __init__(self, keep):
        super().__init__(3, 2)
        keep(self)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.last = x
        return super().forward(x)


def as_attribute(network):
    network.mean = torch.zeros(3)


def as_unsaved_buffer(network):
    network.register_buffer("mean", torch.zeros(3), persistent=False)


def as_buffer(network):
    network.register_buffer("mean", torch.zeros(3))


class Counted(nn.Linear):
    """A temperature falls with the number of passes."""

    def __init__(self):
        super().__init__(3, 2)
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        return super().forward(x) * 0.9**self.passes


class Listed(nn.Module):
    """A hidden layer in the container that `keep` makes."""

    def __init__(self, keep):
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.hidden = keep(nn.Linear(3, 3))
        self.all = [self.out]  # known otherwise

    def forward(self, x):
        (layer,) = self.hidden.values() if hasattr(self.hidden, "values") else self.hidden
        return self.out(layer(x))


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (lambda: Kept(as_attribute), "of Kept in training change mean, outside its state_dict"),
        (lambda: Kept(as_unsaved_buffer), "of Kept in training change mean, outside"),
        (lambda: Kept(as_buffer), ""),
        (Counted, "of Counted in training change passes, outside"),
        (lambda: Listed(lambda layer: [layer]), "Listed keeps layers or parameters in hidden,"),
        (lambda: Listed(lambda layer: {"a": layer}), "parameters in hidden, where torch"),
        (lambda: Listed(lambda layer: nn.ModuleList([layer])), ""),
        (lambda: nn.Sequential(Listed(lambda layer: (layer,))), "parameters in 0.hidden, where"),
        (lambda: nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3), nn.Linear(3, 2)), ""),
    ],
)
def test_what_is_not_sent_is_said(network, said, caplog, monkeypatch):
    """The inputs of the last pass are no news: the same pass twice leaves them as they are."""
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    warn_of_unsent(adopted(network(), "it", (3,))[0], (3,))
    assert said in caplog.text and bool(said) == bool(caplog.text)


class Hidden(Listed):
    """As a run's model."""

    def __init__(self, num_classes: int):
        super().__init__(lambda layer: [layer])
        self.out = nn.Linear(3, num_classes)
        self.all = []


@pytest.mark.parametrize("starts", ["an app", "the command"])
def test_networks_of_apps_and_of_the_command_are_looked_at(starts, caplog, monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    if starts == "an app":
        run_components("fedavg", lambda: Hidden(2), ((x, y), (x, y)), (3,))
    else:
        model = f"{Hidden.__module__}:Hidden"
        monkeypatch.setenv("FEDAPPS_ALLOW", model)
        method_model("fedavg", defaults() | {"model": model}, Info("d", (3,), 2, ""))
    assert "Hidden keeps layers or parameters in hidden, where" in caplog.text
