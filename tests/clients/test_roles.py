"""Frozen and tied parameters, and buffers, where clients meet them; see also the matrix of methods
and networks in tests/test_networks_matrix.py."""

import networks_with_parts
import numpy as np
import pytest
import torch
from small_runs import share

from clients.core.arrays import model_arrays
from clients.core.client import Client
from clients.methods.pfedme import PFedMeClient
from clients.models.roles import check_tied, roles_of

SHAPE = (1, 2, 2)


def test_what_each_array_is():
    roles = roles_of(networks_with_parts.Everything(SHAPE, 10))
    assert roles.frozen == {"first.weight", "first.bias"}
    assert roles.tied == {"third.weight": "second.weight"}
    norms = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert roles.buffers == {"level", "batches", "order", "mask"} | norms


def test_a_tied_parameter_must_not_be_parted_and_others_may():
    network = networks_with_parts.Tied(SHAPE, 10)
    assert check_tied(network, lambda name: name.startswith("head."), "m") is network
    with pytest.raises(ValueError, match=r"^m treats 'third.weight' and 'second.weight' differe"):
        check_tied(network, lambda name: name.startswith("third."), "m")


def labeled():
    return share(torch.rand(6, *SHAPE), torch.arange(6))


def test_of_a_tied_parameters_names_the_first_one_counts():
    network = networks_with_parts.Tied(SHAPE, 10)
    arrays = model_arrays(network)
    arrays["second.weight"] += 1
    Client(network, labeled()).load(arrays)
    assert np.array_equal(network.third.weight.detach().numpy(), arrays["second.weight"])


def test_training_nothing_but_frozen_parameters_is_refused():
    network = networks_with_parts.Plain(SHAPE, 10).requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters that this step trains are frozen"):
        Client(network, labeled()).fit_locally({})


def test_weight_decay_leaves_pfedmes_frozen_parameters_as_they_are():
    network = networks_with_parts.Frozen(SHAPE, 10)
    before = model_arrays(network)
    client = PFedMeClient(network, labeled(), weight_decay=0.5, local_steps=2)
    reply, *_ = client.train(before, {})
    after = model_arrays(network)
    assert np.array_equal(after["first.weight"], before["first.weight"])
    assert "first.weight" not in reply and "theta/first.weight" not in client.state
    assert not np.array_equal(reply["second.weight"], before["second.weight"])
