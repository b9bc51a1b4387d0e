"""The optimizer of local training that a user chooses, against torch's own on the same steps."""

import numpy as np
import pytest
import torch
from component_runs import run_components
from torch import nn
from torch.nn import functional as F

import fedapps
from fedapps.common.seeds import drawing
from fedapps.methods import METHODS

X = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)) - 0.5
Y = torch.arange(12) % 2
STEPS = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.body(x)))


def by_torch(make, rounds=1, schedule=None, decay=1.0):
    """The parameters after full batches of gradient descent, the optimizer new in each round."""
    with drawing(0):
        net = Net()
    for round_ in range(rounds):
        optimizer = make(net.parameters())
        for group in optimizer.param_groups:
            group["lr"] *= decay**round_
        scheduler = schedule(optimizer) if schedule else None
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
    return {name: p.detach().numpy() for name, p in net.named_parameters()}


def trained(method="fedavg", **settings):
    settings = {"local_steps": STEPS, "batch_size": 12} | settings
    return run_components(method, Net, ((X, Y), (X, Y)), (3,), **settings)[0]


def close(found, expected):
    for name, array in found.items():
        known = expected[name.removeprefix("body.") if name.startswith("body.body") else name]
        np.testing.assert_allclose(array, known, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("optimizer", "settings", "make"),
    [
        ("adamw", {}, torch.optim.AdamW),
        ("adam", {}, torch.optim.Adam),
        ("adamw", {"lr": 0.02}, lambda p: torch.optim.AdamW(p, lr=0.02)),
        (
            "adamw",
            {"weight_decay": 0.3, "lr": 0.02},
            lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.3),
        ),
        ("sgd", {"lr": 0.2, "momentum": 0.5}, lambda p: torch.optim.SGD(p, 0.2, momentum=0.5)),
    ],
)
def test_a_named_optimizer_is_torchs_with_its_defaults(optimizer, settings, make):
    """In two rounds: the optimizer's moments begin anew in the second."""
    found = trained(optimizer=optimizer, rounds=2, **settings)
    close(found, by_torch(make, rounds=2))


def test_fedper_with_adamw_is_one_keyword():
    """One node has FedAvg's client, and sends its body alone; its head stays at home."""
    found = trained("fedper", optimizer="adamw")
    assert sorted(found) == ["body.body.bias", "body.body.weight"]
    close(found, by_torch(torch.optim.AdamW))


def test_a_function_of_parameters_and_a_schedule_of_its_steps():
    def make(parameters):
        return torch.optim.RMSprop(parameters, lr=0.05)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    found = trained(optimizer=make, scheduler=schedule, rounds=2)
    expected = by_torch(make, rounds=2, schedule=schedule)
    close(found, expected)
    unscheduled = by_torch(make, rounds=2)
    assert abs(unscheduled["out.weight"] - expected["out.weight"]).max() > 0.01


def test_frozen_parameters_are_not_given():
    def net():
        network = Net()
        network.body.requires_grad_(False)
        return network

    counts = []

    def make(parameters):
        counts.append(len(list(parameters)))
        return torch.optim.SGD(parameters, 0.1)

    run_components("fedavg", net, ((X, Y), (X, Y)), (3,), optimizer=make)
    assert counts == [2]


STEPPERS = ("scaffold", "fedprox", "per-fedavg", "pfedme", "ditto", "apfl", "afl", "fedtta")
LOOPS = ("fedavg", "local", "fedper", "fedrep", "fedbabu", "fedbn", "lg-fedavg", "fedgma", "tent")


@pytest.mark.parametrize("method", STEPPERS)
def test_methods_of_plain_sgd_refuse_by_name(method):
    with pytest.raises(ValueError, match=f"{method} trains by steps of its own.*fedavg.*fedper"):
        fedapps.client_app(method, model=Net, data=lambda _: X, optimizer="adam")


def test_methods_with_fedavgs_loop_take_an_optimizer():
    assert all(METHODS[method].client.takes_optimizer() for method in LOOPS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adagrad"}, "optimizer is 'adagrad'; known: sgd, adam, adamw, or a func"),
        ({"optimizer": torch.optim.Adam}, r"it must be one of .*torch\.optim\.AdamW\(parameters"),
        ({"optimizer": "adam", "scheduler": lambda o: o}, "scheduler= needs an optimizer of torch"),
        ({"scheduler": lambda o: o}, "scheduler= needs an optimizer of torch"),
        (
            {"optimizer": lambda p: torch.optim.SGD(Net().parameters(), 0.1)},
            "optimizer= returned SGD with other parameters than it was given",
        ),
        ({"optimizer": lambda p: torch.optim.LBFGS(p, lr=0.1)}, "LBFGS, whose step needs closure"),
        (
            {
                "optimizer": lambda p: torch.optim.SGD(p, 0.1),
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau,
            },
            "scheduler= returned ReduceLROnPlateau, whose step needs metrics",
        ),
        ({"optimizer": lambda p: None}, "optimizer= returned NoneType, which is no optimizer"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is a setting of SGD, and opt.* is adam"),
        (
            {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "lr": 0.5},
            "lr is a setting of SGD, and optimizer= is a function",
        ),
    ],
)
def test_what_is_not_honoured_is_refused(options, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        trained(**options)
