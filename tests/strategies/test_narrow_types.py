"""Networks in float16: the server sums and measures in float32, and sends float16."""

import numpy as np
import pytest
import torch
from small_runs import update

from clients.core.arrays import to_record
from strategies.core.aggregation import robust_mean, weighted_mean
from strategies.core.limits import group_norms
from strategies.core.replies import Node
from strategies.maths.matching import layer_arrays, match, neurons
from strategies.methods.fedamp import FedAMP
from strategies.methods.fedgma import FedGMA
from strategies.methods.pfedhn import PFedHN
from strategies.methods.pfedme import PFedMe

HALF = np.float16


def half(*values):
    return np.array(values, HALF)


def test_a_mean_over_many_clients():
    """4096 times 1/4096: in float16 the sum stops at ½, where the next number is 2⁻¹¹ away."""
    mean = weighted_mean([{"w": half(1.0)}] * 4096, [1.0] * 4096)["w"]
    assert mean.dtype == HALF and mean.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_wider_types_keep_their_bits(dtype):
    """The sum over clients in order, each times its share in that type."""
    arrays = [np.random.default_rng(i).normal(size=9).astype(dtype) for i in range(5)]
    expected = np.zeros(9, dtype)
    for array in arrays:
        expected += array * dtype(1 / 5)
    mean = weighted_mean([{"w": a} for a in arrays], [1.0] * 5)["w"]
    assert mean.dtype == dtype and mean.tobytes() == expected.tobytes()


def test_robust_means_and_norms():
    """300² and a change of 120 000 are no float16."""
    assert group_norms({"w": half(300.0, 400.0)}, {}) == {"": 500.0}
    replies = [{"w": half(x)} for x in (60_000.0, 60_000.0, 0.0)]
    moved = robust_mean("median", 0.0, {"w": half(-60_000.0)}, replies)["w"]
    assert moved.dtype == HALF and moved.tolist() == [60_000.0]


def test_fedgma_averages_differences_that_float16_cannot_hold():
    """From −60 000 one client goes to 60 000, by 120 000; the other stays: the mean is 60 000."""
    replies = [update(i, {"w": half(x)}) for i, x in enumerate((60_000.0, -60_000.0))]
    after = FedGMA(server_lr=1.0, agreement=0.0).aggregate({"w": half(-60_000.0)}, replies)["w"]
    assert after.dtype == HALF and after.tolist() == [0.0]


def test_fedamp_measures_far_models():
    """‖w_i − w_j‖² = 300² is infinite in float16, and e^(−∞) times it was no number."""
    models = {0: {"w": half(300.0)}, 1: {"w": half(0.0)}}
    with np.errstate(over="raise"):
        cloud = FedAMP(step=1.0, width=10.0).cloud(0, models)["w"]
    assert cloud.dtype == HALF and cloud.tolist() == [300.0]


def test_heads_that_the_server_holds_change_by_the_least_number():
    """Eight users; each one's own head moves by 2⁻²⁴, and an eighth of that is 0 in float16."""
    strategy = PFedMe(heads="server")
    heads = {f"held/{i}/head.w": half(0.0) for i in range(8)}
    replies = [update(i, heads | {f"held/{i}/head.w": half(2.0**-24)}) for i in range(8)]
    stored = strategy.stored(heads, replies)
    assert {a.dtype for a in stored.values()} == {np.dtype(HALF)}
    assert all(a.tolist() == [2.0**-24] for a in stored.values())


def test_fedma_matches_neurons_whose_squares_are_above_float16():
    """Two clients with the neurons (300, 0) and (0, 300) in other orders: matched, not opened."""
    nets = []
    for order in ([0, 1], [1, 0]):
        weight = half([300.0, 0.0], [0.0, 300.0])[order]
        nets.append({"a.weight": weight, "a.bias": half(0.0, 0.0)})
    with np.errstate(over="raise"):
        matched = match(
            [neurons(n, "a") for n in nets], [1.0, 1.0], new_neuron_cost=0.1, max_width=4
        )
    assert sorted(matched.support.tolist()) == [2, 2]
    merged = layer_arrays(matched.neurons, "a", nets[0])["a.weight"]
    assert merged.dtype == HALF and sorted(map(tuple, merged.tolist())) == [(0, 300), (300, 0)]


def test_a_hypernetwork_computes_in_float32_and_sends_float16():
    initial = to_record({"w": np.zeros(5, HALF), "n.running_mean": np.zeros(2, HALF)})
    strategy = PFedHN(embedding_dim=2, hidden_dim=4, server_lr=0.1)
    strategy.open(None, initial, {})
    nodes = [Node(3, 53), Node(4, 54)]
    sent = strategy.broadcast({}, nodes)
    assert {a.dtype for model in sent.values() for a in model.values()} == {np.dtype(HALF)}
    before = strategy.generator.arrays()
    assert {a.dtype for n, a in before.items() if not n.startswith("buffer/")} == {
        np.dtype(np.float32)
    }
    before = {name: array.copy() for name, array in before.items()}
    replies = [update(node.client, sent[node] | {"w": sent[node]["w"] + HALF(1)}) for node in nodes]
    after = strategy.aggregate({}, replies)
    assert any((after[name] != before[name]).any() for name in before)
    assert all(np.isfinite(array).all() for array in after.values())
    generator = strategy.generator
    assert generator.generate([generator.embeddings[3]])["w"].dtype == torch.float32
