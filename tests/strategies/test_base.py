"""Sampling, the roster, exchanges and checks, with the smallest of ClientApps."""

import io

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.arrays import from_record, to_record
from clients.protocol import OFFERS
from fedapps.engines.grid import InProcessGrid
from fedapps.node.bridge import answer
from strategies.base import PersonalizedStrategy
from strategies.fedavg import FedAvg, weighted_mean


def plus(amount, examples=1):
    """A ClientApp that adds `amount` (by node id) to every array; no query handler."""
    client_app = ClientApp()

    @client_app.train()
    def train(message: Message, context):
        arrays = from_record(message.content["arrays"])
        own = amount(context.node_id) if callable(amount) else amount
        reply = {
            "arrays": to_record({n: a + np.float32(own) for n, a in arrays.items()}),
            "metrics": MetricRecord({"num-examples": examples, "loss": 1.0}),
        }
        return Message(RecordDict(reply), reply_to=message)

    @client_app.evaluate()
    def evaluate(message: Message, context):
        value = float(from_record(message.content["arrays"])["w"][0])
        numbers = MetricRecord({"num-examples": 1, "value": value, "accuracy": 0.5})
        return Message(RecordDict({"metrics": numbers}), reply_to=message)

    return client_app


def grid(client_app, nodes=4):
    return InProcessGrid.simulation(client_app, {}, nodes)


START = {"w": np.zeros(2, np.float32)}


def test_weighted_mean_by_hand():
    """(1·[1, 2] + 3·[5, 6]) / 4 = [4, 5]; the counter (1·10 + 3·13) / 4 = 12.25 rounds to 12."""
    mean = weighted_mean(
        [
            {"w": np.array([1, 2], np.float32), "n": np.array(10)},
            {"w": np.array([5, 6], np.float32), "n": np.array(13)},
        ],
        [1, 3],
    )
    assert mean["w"].tolist() == [4, 5]
    assert mean["n"].tolist() == 12
    assert (mean["w"].dtype, mean["n"].dtype) == (np.float32, np.int64)


def test_foreign_clients_take_part_under_their_node_ids():
    """Nodes 1, 2, 3, 4 add their id: the mean moves by 2.5 a round."""
    strategy = FedAvg()
    result = strategy.start(grid(plus(lambda i: i)), to_record(START), num_rounds=2)
    assert from_record(result.arrays)["w"].tolist() == [5.0, 5.0]
    assert [node.client for node in strategy.nodes] == [1, 2, 3, 4]
    assert result.evaluate_metrics_clientapp[2]["value"] == 5.0


def test_sampling_is_seeded_and_takes_the_fraction():
    def sampled(seed):
        rounds = []
        strategy = FedAvg(fraction_train=0.5, seed=seed)
        original = strategy.sample
        strategy.sample = lambda: rounds.append(original()) or rounds[-1]
        strategy.start(grid(plus(1), 8), to_record(START), num_rounds=6)
        return [[node.client for node in nodes] for nodes in rounds]

    assert sampled(0) == sampled(0) != sampled(1)
    assert all(len(nodes) == 4 and nodes == sorted(nodes) for nodes in sampled(0))
    assert len({tuple(nodes) for nodes in sampled(0)}) > 1


def test_clients_may_join_and_leave():
    """Rounds of 2, 3 and 1 nodes, each adding 1, 1 and 1."""
    shared = grid(plus(1), 3)
    everyone = dict(shared.contexts)
    present = iter([[1, 2], [1, 2, 3], [3]])
    sizes = []

    class Changing(FedAvg):
        def configure_train(self, *arguments):
            ids = next(present)
            shared.contexts = {i: everyone[i] for i in ids}
            return super().configure_train(*arguments)

        def aggregate(self, arrays, updates):
            sizes.append(len(updates))
            return super().aggregate(arrays, updates)

    result = Changing().start(shared, to_record(START), num_rounds=3)
    assert sizes == [2, 3, 1]
    assert from_record(result.arrays)["w"].tolist() == [3.0, 3.0]


def replies(spoil):
    client_app = plus(1)
    good = client_app._registered_funcs["train.default"]
    other = ClientApp()
    other.evaluate()(client_app._registered_funcs["evaluate.default"])

    @other.train()
    def train(message, context):
        reply = good(message, context)
        return spoil(reply) if context.node_id == 1 else reply

    return other


def with_arrays(change):
    def spoil(reply):
        arrays = from_record(reply.content["arrays"])
        reply.content["arrays"] = to_record(change(arrays))
        return reply

    return spoil


def with_metrics(**numbers):
    def spoil(reply):
        reply.content["metrics"] = MetricRecord(numbers)
        return reply

    return spoil


def with_bytes(change):
    """The array's bytes, a .npy file: magic and lengths (10 bytes), a header, two float32."""

    def spoil(reply):
        reply.content["arrays"]["w"].data = change(reply.content["arrays"]["w"].data)
        return reply

    return spoil


def zipped(data):
    file = io.BytesIO()
    np.savez(file, w=np.ones(2, np.float32))
    return file.getvalue()


def pickled(data):
    file = io.BytesIO()
    np.save(file, np.array([print, print]), allow_pickle=True)
    return file.getvalue()


def claiming(shape):
    """Another shape in the header, whose length stays."""

    def change(data):
        header = data[10:-8]
        other = header.rstrip().replace(b"(2,)", shape)
        return data[:10] + other.ljust(len(header) - 1) + b"\n" + data[-8:]

    return change


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
        (with_bytes(lambda data: data[:20]), "malformed"),
        (with_bytes(lambda data: b""), "malformed"),
        (with_bytes(lambda data: data + b"more"), "malformed"),
        (with_bytes(zipped), "malformed"),
        (with_bytes(pickled), "malformed"),
        (with_bytes(claiming(b"(1000000000000000,)")), "malformed"),
        (with_bytes(claiming(b"(-1, -2)")), "malformed"),
        (with_bytes(claiming(b"((((((")), "malformed"),
        (with_bytes(claiming(b"'''")), "malformed"),
        (with_arrays(lambda a: {"w": a["w"] * np.float32(1e10)}), "absurd"),
        (with_arrays(lambda a: {"w": a["w"] * np.float32(3e38)}), "absurd"),
    ],
)
def test_replies_are_not_trusted(spoil, cause):
    result = FedAvg().start(grid(replies(spoil)), to_record(START), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert metrics[f"dropped-{cause}"] == 1
    assert metrics["valid-replies"] == 3
    assert from_record(result.arrays)["w"].tolist() == [1.0, 1.0]


def test_an_extra_metric_of_one_client_is_no_error():
    spoil = with_metrics(**{"num-examples": 1, "loss": 2.0, "extra": 5})
    result = FedAvg().start(grid(replies(spoil)), to_record(START), num_rounds=1)
    assert result.train_metrics_clientapp[1]["loss"] == 1.25


def test_missing_nodes_are_waited_for_then_named():
    with pytest.raises(RuntimeError, match="2 of 3 nodes"):
        FedAvg(min_available_nodes=3, wait=0.1).start(grid(plus(1), 2), to_record(START), 1)


def test_a_client_that_cannot_start_is_quoted():
    """Whereas an app that is not ours may raise at that question and take part."""

    def make(context, method):
        raise OSError("no such disk")

    client_app = ClientApp()
    client_app.query()(lambda message, context: answer(message, context, make))
    with pytest.raises(RuntimeError, match="no such disk"):
        FedAvg().start(grid(client_app), to_record(START), num_rounds=1)


def test_novel_nodes_are_scored_but_never_trained():
    client_app = plus(1)
    trained = set()
    good = client_app._registered_funcs.pop("train.default")

    @client_app.train()
    def train(message, context):
        trained.add(context.node_id)
        return good(message, context)

    @client_app.query()
    def query(message, context):
        told = {OFFERS: "", "client": context.node_id - 1, "novel": context.node_id > 2}
        return Message(RecordDict({"properties": ConfigRecord(told)}), reply_to=message)

    result = FedAvg().start(grid(client_app), to_record(START), num_rounds=2)
    assert trained == {1, 2}
    metrics = result.evaluate_metrics_clientapp[2]
    assert (metrics["train-clients"], metrics["novel-clients"]) == (2, 2)
    assert metrics["novel-sem"] == 0.0


def test_exchange_within_a_round_reaches_named_actions():
    client_app = plus(1)

    @client_app.query("double")
    def double(message, context):
        arrays = from_record(message.content["arrays"])
        reply = {"arrays": to_record({n: 2 * a for n, a in arrays.items()})}
        return Message(RecordDict(reply), reply_to=message)

    class Doubling(FedAvg):
        def broadcast(self, arrays, nodes):
            asked = self.exchange("query.double", {n: {"v": np.ones(1)} for n in nodes})
            assert [update.node for update in asked] == nodes
            assert all(update.arrays["v"] == 2 for update in asked)
            return super().broadcast(arrays, nodes)

    Doubling().start(grid(client_app), to_record(START), num_rounds=1)


def test_who_fails_before_an_evaluation_is_counted_with_it():
    """All four nodes, so that nobody is left to be evaluated."""

    class Asking(FedAvg):
        def personalize(self, arrays, nodes):
            asked = self.exchange("query.unknown", {n: {} for n in nodes})
            return {update.node: arrays for update in asked}

        def broadcast(self, arrays, nodes):
            return dict.fromkeys(nodes, arrays)

    reports = []
    Asking(on_round=reports.append).start(grid(plus(1)), to_record(START), num_rounds=1)
    assert (reports[0]["dropped"], reports[0]["evaluation-dropped"]) == ({}, {"error": 4})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction_train": 0.0}, "fraction-train is 0.0"),
        ({"evaluate_every": 0}, "evaluate-every is 0"),
        ({"on_client_failure": "pray"}, "'pray'.*skip"),
    ],
)
def test_settings_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        FedAvg(**options)


def test_evaluations_come_every_so_often_and_after_the_last_round():
    result = FedAvg(evaluate_every=3).start(grid(plus(1)), to_record(START), num_rounds=7)
    assert list(result.evaluate_metrics_clientapp) == [3, 6, 7]


def test_a_wrapper_that_changes_the_arrays_is_obeyed():
    """A strategy around ours may hand it other arrays than those it gave, as DP wrappers do."""

    class Around(PersonalizedStrategy):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def configure_train(self, server_round, arrays, config, grid):
            return self.inner.configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            arrays, metrics = self.inner.aggregate_train(server_round, replies)
            doubled = {n: 2 * a for n, a in from_record(arrays).items()}
            return to_record(doubled), metrics

        def configure_evaluate(self, server_round, arrays, config, grid):
            self.final: ArrayRecord = arrays
            return []

        def aggregate_evaluate(self, server_round, replies):
            return None

    around = Around(FedAvg())
    around.start(grid(plus(1)), to_record(START), num_rounds=2)
    assert from_record(around.final)["w"].tolist() == [6.0, 6.0]  # 2·(0 + 1) = 2, 2·(2 + 1) = 6


def test_updates_are_clipped_at_a_norm():
    """Node i adds i to two entries, √2·i far; clipped at 3√2 nodes 1…5 add 1, 2, 3, 3, 3."""
    strategy = FedAvg(max_update_norm=3 * 2**0.5)
    result = strategy.start(grid(plus(lambda i: i), 5), to_record(START), num_rounds=1)
    np.testing.assert_allclose(from_record(result.arrays)["w"], [12 / 5] * 2, rtol=1e-6)
    assert strategy.now.report["clipped"] == 2


@pytest.mark.parametrize("opening", [True, False])
def test_an_absurd_sample_count_of_the_opening_weighs_as_the_usual_one(opening):
    """Node i adds i and says 10·i samples, node 1 10⁹, from its first answer on or without any:
    of 20, 30, 40, 10⁹ the lower median is 30, hence 30·1 + 20·2 + 30·3 + 40·4 = 320 of 120."""

    def count(i):
        return 10**9 if i == 1 else 10 * i

    client_app = plus(lambda i: i, examples=1)
    good = client_app._registered_funcs.pop("train.default")

    @client_app.train()
    def train(message, context):
        reply = good(message, context)
        reply.content["metrics"]["num-examples"] = count(context.node_id)
        return reply

    @client_app.query()
    def query(message, context):
        said = {OFFERS: "", "client": context.node_id} | (
            {"num-examples": count(context.node_id)} if opening else {}
        )
        return Message(RecordDict({"properties": ConfigRecord(said)}), reply_to=message)

    result = FedAvg().start(grid(client_app), to_record(START), num_rounds=1)
    assert from_record(result.arrays)["w"].tolist() == pytest.approx([320 / 120] * 2)


@pytest.mark.parametrize("claimed", [9, 10**9])
def test_nobody_weighs_more_than_by_the_samples_it_told(claimed):
    """Node 1 adds 1 and told 3 samples, then says more; the others add 2, 3 and 4, with 1 each."""
    client_app = plus(lambda i: i, examples=1)
    good = client_app._registered_funcs.pop("train.default")

    @client_app.train()
    def train(message, context):
        reply = good(message, context)
        if context.node_id == 1:
            reply.content["metrics"]["num-examples"] = claimed
        return reply

    @client_app.query()
    def query(message, context):
        told = ConfigRecord({OFFERS: "", "client": context.node_id, "num-examples": 3})
        return Message(RecordDict({"properties": told}), reply_to=message)

    result = FedAvg().start(grid(client_app), to_record(START), num_rounds=1)
    assert from_record(result.arrays)["w"].tolist() == [2.0, 2.0]  # (3·1 + 2 + 3 + 4) / 6
