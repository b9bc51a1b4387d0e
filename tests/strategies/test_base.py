"""Sampling, checks of replies, and what stops a run."""

import numpy as np
import pytest
from arithmetic_clients import START, asked, go
from flwr.app import MetricRecord
from flwr.clientapp import ClientApp
from malformed_replies import BYTES

from clients.core.arrays import from_record, to_record
from fedapps.clientapp import answer
from fedapps.engines.in_process_grid import InProcessGrid
from strategies.methods.fedavg import FedAvg


def test_sampling_is_seeded_and_takes_the_fraction():
    def sampled(seed):
        strategy = FedAvg(fraction_train=0.5, seed=seed, fraction_evaluate=0)
        trained = asked(go(strategy, nodes=8, num_rounds=6)[1], "train")
        return [trained[4 * i : 4 * i + 4] for i in range(6)]

    assert sampled(0) == sampled(0) != sampled(1)
    assert all(nodes == sorted(set(nodes)) for nodes in sampled(0))
    assert len({tuple(nodes) for nodes in sampled(0)}) > 1


def with_arrays(change):
    def spoil(reply):
        reply.content["arrays"] = to_record(change(from_record(reply.content["arrays"])))

    return spoil


def with_metrics(**numbers):
    def spoil(reply):
        reply.content["metrics"] = MetricRecord(numbers)

    return spoil


def with_bytes(data):
    def spoil(reply):
        reply.content["arrays"]["w"].data = data

    return spoil


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (with_arrays(lambda a: {}), "names"),
        (with_arrays(lambda a: a | {"extra": a["w"]}), "names"),
        (with_arrays(lambda a: {"w": a["w"][:1]}), "shape"),
        (with_arrays(lambda a: {"w": a["w"].astype(np.int64)}), "dtype"),
        (with_arrays(lambda a: {"w": a["w"].astype(np.float64) + 1e300}), "not-finite"),
        (with_arrays(lambda a: {"w": a["w"] * np.float32("inf")}), "not-finite"),
        (with_metrics(loss=1.0), "malformed"),
        (with_metrics(**{"num-examples": 0}), "malformed"),
        (with_metrics(**{"num-examples": float("nan")}), "malformed"),
        (with_metrics(**{"num-examples": [3, 4]}), "malformed"),
        (with_metrics(**{"num-examples": 10**12}), "malformed"),
        (with_metrics(**{"num-examples": -1.5}), "malformed"),
        *[(with_bytes(data), "malformed") for data in BYTES.values()],
        (with_arrays(lambda a: {"w": a["w"] * np.float32(1e10)}), "absurd"),
        (with_arrays(lambda a: {"w": a["w"] * np.float32(3e36)}), "absurd"),
    ],
)
def test_replies_are_not_trusted(spoil, cause):
    """Nodes 2 and 3 remain: 100 + 2.5."""
    result, _, _ = go(FedAvg(), spoil=spoil)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics[f"dropped-{cause}"], metrics["valid-replies"]) == (1, 2)
    assert from_record(result.arrays)["w"].tolist() == [102.5, 102.5]


def test_missing_nodes_are_waited_for_then_named():
    with pytest.raises(RuntimeError, match="2 of 3 nodes"):
        go(FedAvg(min_available_nodes=3, wait=0.1), nodes=2)


def test_a_client_that_cannot_start_is_quoted(monkeypatch):
    """Whereas a foreign app may raise at that question and take part."""

    def make(context, method):
        raise OSError("no such disk")

    monkeypatch.setattr("fedapps.clientapp.make_client", make)
    client_app = ClientApp()
    client_app.query()(answer)
    grid = InProcessGrid.simulation(client_app, {}, 4)
    with pytest.raises(RuntimeError, match="no such disk"):
        FedAvg().start(grid, to_record(START), num_rounds=1)


def test_who_fails_before_an_evaluation_is_counted_with_it():
    """All three nodes, so that nobody is left to be evaluated."""

    class Asking(FedAvg):
        def personalize(self, arrays, nodes):
            replies = self.exchange("query.unknown", {n: {} for n in nodes})
            return {update.node: arrays for update in replies}

        def broadcast(self, arrays, nodes):
            return dict.fromkeys(nodes, arrays)

    _, _, reports = go(Asking())
    assert (reports[0]["dropped"], reports[0]["evaluation-dropped"]) == ({}, {"error": 3})


def test_evaluations_come_every_so_often_and_after_the_last_round():
    result, _, _ = go(FedAvg(evaluate_every=3), num_rounds=7)
    assert list(result.evaluate_metrics_clientapp) == [3, 6, 7]


@pytest.mark.parametrize(
    ("joined", "replied", "mean"),
    [
        ({1: 10**9, 2: 20, 3: 30, 4: 40}, {1: 10**9, 2: 20, 3: 30, 4: 40}, 380 / 180),
        ({}, {1: 10**9, 2: 20, 3: 30, 4: 40}, 380 / 180),
        (dict.fromkeys((1, 2, 3, 4), 3), {1: 9, 2: 1, 3: 1, 4: 1}, 2.0),
        (dict.fromkeys((1, 2, 3, 4), 3), {1: 10**9, 2: 1, 3: 1, 4: 1}, 2.0),
    ],
)
def test_a_sample_count_is_bounded(joined, replied, mean):
    """With `protect`. Node i adds i. Of 20, 30, 40 and 10⁹ samples, the last counts as 3 times the
    lower median 30, whether or not the counts were given on joining: 90·1 + 20·2 + 30·3 + 40·4 of
    180. A node that gave 3 on joining never weighs more: (3·1 + 2 + 3 + 4) / 6 = 2."""
    result, _, _ = go(FedAvg(protect=True), nodes=4, joined=joined, replied=replied)
    assert from_record(result.arrays)["w"].tolist() == pytest.approx([100 + mean] * 2, rel=1e-6)


def test_restored_arrays_have_the_networks_order():
    """By which `auto` knows its layers. A file has the order of the names."""
    initial = {"norms.0.weight": np.zeros(2), "norm.weight": np.zeros(3)}
    saved = {"norm.weight": np.full(3, 2.0), "norms.0.weight": np.ones(2)}
    restored = FedAvg().restore(initial, saved)
    assert [(name, array[0]) for name, array in restored.items()] == [
        ("norms.0.weight", 1.0),
        ("norm.weight", 2.0),
    ]
