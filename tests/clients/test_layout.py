"""A network's layout follows each change of the network; numbers by hand."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from clients.core.arrays import load_into_model, model_arrays
from clients.core.layout import layout_of


def network():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))


def replace_module(model):
    model[0] = nn.Linear(2, 2)


def replace_parameter(model):
    model[2].weight = nn.Parameter(torch.full((1, 2), 7.0))


def move_memory(model):
    model[2].weight.data = torch.full((1, 2), 7.0)


def replace_buffer(model):
    model[1].running_mean = torch.full((2,), 7.0)


def add_buffer(model):
    model.register_buffer("more", torch.full((2,), 7.0))


def add_bias(model):
    model[2].bias = nn.Parameter(torch.full((1,), 7.0))


def widen(model):
    model.double()


def add_norm(model):
    weight_norm(model[0])


def shadow(model):
    """Let the state dict compute an entry."""
    model.register_state_dict_post_hook(
        lambda module, state, *_: state.update({"2.weight": 2 * module[2].weight})
    )


CHANGES = (
    *(replace_module, replace_parameter, move_memory, replace_buffer, add_buffer, add_bias),
    *(widen, add_norm, shadow),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_after_a_change_of_the_network_its_arrays_are_those_of_its_state_dict(change):
    model = network()
    model_arrays(model)
    change(model)
    for factor in (3, 1):  # the second time from what was kept
        expected = {name: t.detach().numpy().copy() for name, t in model.state_dict().items()}
        arrays = model_arrays(model)
        assert list(arrays) == list(expected)
        for name, array in arrays.items():
            assert array.dtype == expected[name].dtype
            np.testing.assert_array_equal(array, expected[name])
        with torch.no_grad():
            model[2].weight.mul_(factor)
    parameters = list(layout_of(model).parameters.values())
    assert set(map(id, parameters)) == set(map(id, model.parameters()))
    assert set(map(id, layout_of(model).children)) == set(map(id, [*model.modules()][1:]))


@pytest.mark.parametrize("change", CHANGES[:-1], ids=lambda change: change.__name__)
def test_arrays_are_loaded_into_the_changed_network(change):
    model = network()
    model_arrays(model)
    change(model)
    sent = {name: a + 5 for name, a in model_arrays(model).items() if a.dtype != bool}
    load_into_model(model, sent, {})
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), sent[name])


def test_a_network_that_stays_the_same_is_walked_once():
    model = network()
    assert layout_of(model) is layout_of(model)
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert layout_of(model) is layout_of(model)


def test_arrays_are_copies_and_of_a_tied_parameters_names_the_first_counts():
    model = network()
    model[2] = nn.Linear(2, 2, bias=False)
    model[2].weight = model[0].weight
    arrays = model_arrays(model)
    load_into_model(
        model, arrays | {"0.weight": np.full((2, 2), 3.0), "2.weight": -arrays["2.weight"]}, {}
    )
    assert model[2].weight.tolist() == [[3, 3], [3, 3]]
    assert not (arrays["0.weight"] == 3).any()


def test_types_that_numpy_lacks_are_loaded():
    model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    assert layout_of(model).views is None
    load_into_model(model, {"weight": np.float32([[1.5, -2]])}, {})
    assert model.weight.tolist() == [[1.5, -2]]


def test_the_layout_keeps_no_network_alive():
    model = network()
    layout, seen = layout_of(model), weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None and layout.children
