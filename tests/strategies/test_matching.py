import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.core.arrays import model_arrays
from clients.core.layer_chain import chain
from clients.models import build_model
from strategies.maths.matching import layer_arrays, match, neurons, scatter_columns, take


def rows(*values):
    return np.array(values, float)[:, None]


def test_two_clients_by_hand():
    """(0, 10) and (10.2, 0.4) on the line: crosswise, means 0.2 and 10.1; weighted 3 : 1 0.1 and
    10.05."""
    clients = [rows(0, 10), rows(10.2, 0.4)]
    even = match(clients, [1, 1], new_neuron_cost=1, max_width=4)
    assert [a.tolist() for a in even.assignments] == [[0, 1], [1, 0]]
    np.testing.assert_allclose(even.neurons, rows(0.2, 10.1))
    np.testing.assert_array_equal(even.support, [2, 2])
    uneven = match(clients, [3, 1], new_neuron_cost=1, max_width=4)
    np.testing.assert_allclose(uneven.neurons, rows(0.1, 10.05))


def test_each_further_new_neuron_costs_more():
    """Both of (3, 7) lie 9 from the nearest of (0, 10); mean squared norm (50 + 29)/2 = 39.5. At
    0.2·39.5 = 7.9 the first opens a neuron, the second would cost 7.9·(1 + ln 2) = 13.4."""
    found = match([rows(0, 10), rows(3, 7)], [1, 1], new_neuron_cost=0.2, max_width=9, sweeps=0)
    assert len(found.neurons) == 3


@pytest.mark.parametrize("lie", [9e17, 0.0, "equal"])
def test_absurd_neurons_of_a_client_shift_means_alone(lie):
    """All zero or all equal, and the others' neurons are still matched with each other. Beside
    neurons as large as a reply may have, the others' differences vanish; the layer stays finite."""
    rng = np.random.default_rng(0)
    honest = rng.normal(size=(4, 3)).astype(np.float32)
    liar = np.full((4, 3), honest[0, 0]) if lie == "equal" else honest * np.float32(lie)
    for clients in ([liar, honest, honest[::-1]], [honest, honest[::-1], liar]):
        found = match(clients, [1, 1, 1], new_neuron_cost=1, max_width=6)
        own, other = [a for a, c in zip(found.assignments, clients, strict=True) if c is not liar]
        assert len(set(own.tolist())) == 4 and (lie == 9e17 or own.tolist() == other[::-1].tolist())
        assert np.isfinite(found.neurons).all() and len(found.neurons) <= 6


@given(st.integers(0, 99), st.integers(2, 4), st.floats(0, 2), st.integers(0, 2))
def test_every_match_is_one_to_one_and_averages(seed, count, cost, sweeps):
    rng = np.random.default_rng(seed)
    clients = [rng.normal(size=(3, 2)) for _ in range(count)]
    weights = rng.uniform(1, 5, count).tolist()
    found = match(clients, weights, new_neuron_cost=cost, max_width=6, sweeps=sweeps)
    assert 3 <= len(found.neurons) <= 6
    assert all(len(set(a.tolist())) == 3 for a in found.assignments)
    for i, theta in enumerate(found.neurons):
        owned = [
            (weight, own[neuron])
            for own, weight, a in zip(clients, weights, found.assignments, strict=True)
            for neuron in np.flatnonzero(a == i)
        ]
        assert len(owned) == found.support[i] > 0
        mean = sum(w * v for w, v in owned) / sum(w for w, _ in owned)
        np.testing.assert_allclose(theta, mean, atol=1e-9)


def test_spread_by_hand():
    """Two channels of 2 flattened inputs each, moved to places 2 and 0 of three."""
    weight = np.array([[1, 2, 3, 4]])
    wide = scatter_columns(weight, np.array([2, 0]), 3)
    np.testing.assert_array_equal(wide, [[3, 4, 0, 0, 1, 2]])
    np.testing.assert_array_equal(take(wide, np.array([2, 0]), 3), weight)


@pytest.mark.parametrize("shape", [(4, 3), (4, 6), (4, 3, 5, 5)])
def test_take_undoes_spread(shape):
    weight = np.random.default_rng(0).normal(size=shape)
    assignment = np.array([4, 0, 2])
    wide = scatter_columns(weight, assignment, 5)
    assert wide.shape == (4, 5 * shape[1] // 3, *shape[2:])
    np.testing.assert_array_equal(take(wide, assignment, 5), weight)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mlp", ["layers.0", "layers.1", "head"]),
        ("convnet", ["conv1", "conv2", "fc", "head"]),
        ("lenet", ["conv1", "conv2", "fc1", "fc2", "head"]),
    ],
)
def test_chains_of_the_registered_networks(name, layers):
    arrays = model_arrays(build_model(name, (1, 16, 16), 3, 0))
    assert chain(arrays) == layers
    for layer in layers:
        again = layer_arrays(neurons(arrays, layer), layer, arrays)
        for key, array in again.items():
            np.testing.assert_array_equal(array, arrays[key])


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"a.weight": np.zeros((2, 3)), "a.bias": np.zeros(2), "b.weight": np.zeros((1, 4)),
          "b.bias": np.zeros(1)}, "'a' has 2 outputs, but 'b', which comes next, 4 inputs"),
        ({"a.weight": np.zeros((2, 3))}, "with biases; 'a' is none"),
        ({"norm.weight": np.zeros(3), "norm.bias": np.zeros(3)}, "with biases; 'norm' is none"),
        ({"gain": np.zeros(())}, "with biases; 'gain' is none"),
        ({"a.weight": np.zeros((2, 3)), "a.bias": np.zeros(2)}, "its arrays are a.weight"),
    ],
)  # fmt: skip
def test_other_networks_are_refused_by_the_layer_that_does_not_fit(arrays, why):
    with pytest.raises(ValueError, match=why):
        chain(arrays)


def test_what_a_new_neuron_costs_by_hand():
    """(3, 4) and (0, 1) have the mean squared norm 13 and the distance 18: at 1.5·13 = 19.5 they
    are one neuron, the mean weighed by 1 and 3, at 1.2·13 = 15.6 they are two."""
    clients = [np.array([[3.0, 4.0]]), np.array([[0.0, 1.0]])]
    for cost, expected in ((1.5, [[0.75, 1.75]]), (1.2, [[3, 4], [0, 1]])):
        found = match(clients, [1, 3], new_neuron_cost=cost, max_width=2, sweeps=0)
        assert found.neurons.tolist() == expected
        assert found.support.tolist() == ([2] if cost == 1.5 else [1, 1])


def test_a_sweep_matches_anew_by_hand():
    """0, 6 and 10, of mean squared norm 45.3; a new neuron costs 0.9 of it, 40.8. In turn 6 joins
    0 (36), and 10 is too far from their mean 3 (49). Matched anew, 6 is nearer to 10 (16)."""
    clients = [np.array([[value]]) for value in (0.0, 6.0, 10.0)]
    for sweeps, expected in ((0, [3.0, 10.0]), (1, [0.0, 8.0])):
        found = match(clients, [1, 1, 1], new_neuron_cost=0.9, max_width=2, sweeps=sweeps)
        assert found.neurons.flatten().tolist() == expected
