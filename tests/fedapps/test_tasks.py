"""A task that a method, a setting or a class does not serve is refused by name, before the run."""

import numpy as np
import pytest
import torch
from custom_methods import SMOOTHED, SmoothedClient
from small_runs import fedapps, share
from torch import Tensor, nn
from torch.nn import functional as F

from clients.core.client import Client
from clients.methods.pfedhn import PFedHNClient
from clients.methods.tent import TENTClient
from fedapps.common.tasks import ALL_TASKS, BINARY, CLASSES, LABELS, VALUES, Targets
from fedapps.methods import Method, check_serves, check_settings_serve
from fedapps.planning import check_task
from fedapps.settings.config import defaults
from strategies.methods.fedavg import FedAvg


class PenalisedClient(Client):
    """A loss of its own around the task's."""

    tasks = (CLASSES, VALUES)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + 0.1


class FurtherClient(PenalisedClient):
    """It inherits the declaration, since its loss is inherited."""


class AnotherClient(PenalisedClient):
    """It does not: the inherited declaration is about another loss."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)


@pytest.fixture
def values(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("f4")
    np.savez(tmp_path / "values.npz", x=x, y=x.sum(1))
    return {"dataset": str(tmp_path / "values.npz"), "task": VALUES, "partition": "iid"}


def test_the_command_refuses_a_method_by_name(values, tmp_path):
    words = ["num-clients=4", *(f"{key}={value}" for key, value in values.items())]
    said = fedapps("run", "--methods", "fedavg,tent", *words, "--output", tmp_path / "out", code=2)
    assert "tent serves classes, binary, not task=values; those that do: local, fedavg" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("t3a", {}, "t3a serves classes, not task=values; those that do: local, "),
        ("fedtta", {"fedtta.mu": 0.5},
         "fedtta.mu=0.5 serves classes, binary, not task=values; or set fedtta.mu=0.0"),
        ("fedtta", {"fedtta.max-steps": 3}, "fedtta.max-steps=3 .* or set fedtta.max-steps=1"),
        ("fedmd", {"fedmd.digest-loss": "kl"}, "set fedmd.digest-loss=mae"),
        ("pfedhn", {"pfedhn.descriptor": "class-shares"},
         "pfedhn.descriptor=class-shares serves classes, not task=values; .*=learnt"),
        ("pfedhn-pc", {"pfedhn-pc.local-classes": True}, "set pfedhn-pc.local-classes=False"),
        ("fedavg", {"selection-metric": "macro-f1"}, "selection-metric is 'macro-f1'"),
        ("custom_methods:SMOOTHED", {},
         r"SmoothedClient serves classes, not task=values. It has a .* tasks = \('values', …\)"),
    ],
)  # fmt: skip
def test_methods_and_settings_are_refused_by_name(method, changes, said, values, monkeypatch):
    monkeypatch.setenv("FEDAPPS_ALLOW", "custom_methods:SMOOTHED")
    config = defaults() | values | {"method": method}
    with pytest.raises(ValueError, match=said):
        check_task(config | changes, method)


@pytest.mark.parametrize("method", ["fedtta", "fedmd", "pfedhn", "pfedhn-pc", "fedavg"])
def test_their_defaults_serve_values(method, values):
    check_task(defaults() | values | {"method": method}, method)


def test_two_classes_have_a_further_choice():
    with pytest.raises(ValueError, match="t3a serves classes, not task=binary; set task=classes"):
        check_serves("t3a", BINARY)
    with pytest.raises(ValueError, match="not task=labels; those that do"):
        check_serves("tent", LABELS)
    check_serves("tent", BINARY)
    check_settings_serve("fedtta", {"mu": 0.5}, BINARY)


def test_a_loss_needs_a_declaration_of_its_own():
    assert SmoothedClient.served_tasks() == AnotherClient.served_tasks() == (CLASSES,)
    assert PenalisedClient.served_tasks() == FurtherClient.served_tasks() == (CLASSES, VALUES)
    assert PFedHNClient.served_tasks() == Client.served_tasks() == ALL_TASKS
    assert SMOOTHED.served_tasks == (CLASSES,)


def test_a_client_refuses_data_of_another_task():
    """As on a real node, whose server does not see the labels."""
    data = share(torch.zeros(2, 3), torch.zeros(2, 1))
    data = type(data)(**vars(data) | {"targets": Targets(VALUES)})
    with pytest.raises(ValueError, match="TENTClient serves classes, binary, not task=values"):
        TENTClient(nn.Linear(3, 1), data)
    assert Client(nn.Linear(3, 1), data).criterion is F.mse_loss


def test_a_method_names_known_tasks():
    with pytest.raises(ValueError, match="tasks of a Method is 'regression'; it must be of class"):
        Method(FedAvg, Client, "mine", "line", tasks=("regression",))
    named = Method(FedAvg, Client, "mine", "line", tasks=(VALUES,))
    assert named.served_tasks == (VALUES,)


def test_the_list_of_methods_has_their_tasks():
    said = fedapps("list", "methods", "--family", "test-time")
    assert "tasks" in said
    assert "classes, binary" in said
