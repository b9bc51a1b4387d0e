"""The arguments of Flower's FedAvg, and which clients are believed, with foreign clients."""

import inspect
import logging
from functools import partial

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy import FedMedian

from clients.core.arrays import from_record, to_record
from clients.core.protocol import CAPABILITIES
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.settings.config import defaults
from strategies import AFL, FedAMP, FedAvg, FedRep, PFedHN
from strategies.core.evaluation import foreign_means
from strategies.core.reply_checks import foreign_numbers
from strategies.core.roster import unlogged

START = {"w": np.zeros(2, np.float32)}


def clients(query=None, offers=None, count=3, keys=("arrays", "config")):
    """Node i adds i, weighs i samples or 1 / i, and measures i and [i, 0]; those in `offers` say
    that they are ours, and what they offer."""
    client_app, asked = ClientApp(), []

    def numbers_of(i):
        return {"num-examples": i, "weight": 1 / i, "size": i, "pair": [float(i), 0.0]}

    @client_app.train()
    def train(message, context):
        i, arrays = context.node_id, from_record(message.content[keys[0]])
        asked.append((message.content[keys[1]]["server-round"], i))
        moved = to_record({n: a + np.float32(i) for n, a in arrays.items()})
        got = MetricRecord(numbers_of(i) | ({"risk": 1.0} if i in (offers or {}) else {}))
        return Message(RecordDict({"arrays": moved, "metrics": got}), reply_to=message)

    @client_app.evaluate()
    def evaluate(message, context):
        got = MetricRecord(numbers_of(context.node_id))
        return Message(RecordDict({"metrics": got}), reply_to=message)

    if query or offers:

        @client_app.query()
        def query_(message, context):
            if query:
                return query(message)
            ours = {CAPABILITIES: offers[context.node_id]} if context.node_id in offers else {}
            said = ConfigRecord({"client": context.node_id} | ours)
            return Message(RecordDict({"said": said}), reply_to=message)

    return InProcessGrid.simulation(client_app, {}, count), asked


def go(strategy, grid, rounds=1):
    result = strategy.start(grid, to_record(START), num_rounds=rounds)
    return from_record(result.arrays)["w"].tolist()[0], result


@pytest.mark.parametrize(("key", "mean"), [("num-examples", 14 / 6), ("weight", 3 / (11 / 6))])
def test_weights_are_what_the_key_says_as_in_flower(key, mean):
    """(1·1 + 2·2 + 3·3) / 6, and (1 + 1 + 1) / (1 + ½ + ⅓)."""
    grid, _ = clients()
    found, result = go(FedAvg(weighted_by_key=key), grid)
    assert found == pytest.approx(mean)
    flowers = FlowersFedAvg(weighted_by_key=key, min_available_nodes=3)
    theirs = flowers.start(clients()[0], to_record(START), num_rounds=1)
    assert found == pytest.approx(from_record(theirs.arrays)["w"][0])
    for ours, other in (
        (result.train_metrics_clientapp, theirs.train_metrics_clientapp),
        (result.evaluate_metrics_clientapp, theirs.evaluate_metrics_clientapp),
    ):
        for name, value in other[1].items():
            assert ours[1][name] == pytest.approx(value)


def test_a_weight_that_is_missing_or_no_number_costs_the_reply():
    with pytest.raises(RuntimeError, match=r"0 valid replies of 3.*malformed"):
        go(FedAvg(weighted_by_key="samples"), clients()[0])


def test_metrics_are_aggregated_by_ones_own_functions():
    def most(records, key):
        assert all(isinstance(record, RecordDict) for record in records)
        got = [record["metrics"] for record in records]
        return MetricRecord({"most": max(one["size"] * one[key] for one in got)})

    options = {"train_metrics_aggr_fn": most, "evaluate_metrics_aggr_fn": most}
    _, result = go(FedAvg(**options), clients()[0])
    assert result.train_metrics_clientapp[1]["most"] == 9
    assert result.evaluate_metrics_clientapp[1] == {"most": 9}


@pytest.mark.parametrize("name", ["train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"])
def test_a_function_that_returns_no_metrics_is_named(name):
    """It ended with "'NoneType' object is not iterable"."""

    def printed(records, key):
        print(records)

    with pytest.raises(ValueError, match="printed, which aggregates metrics, returned a NoneType"):
        go(FedAvg(**{name: printed}), clients()[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"initial_arrays": {"w": np.zeros(2)}}, "initial_arrays is a dict; give an ArrayRecord"),
        ({"initial_arrays": [np.zeros(2)]}, "initial_arrays is a list; give an ArrayRecord"),
        ({"num_rounds": -1}, "num_rounds is -1; it must be a whole number from 0"),
        ({"num_rounds": 2.0}, "num_rounds is 2.0; it must be a whole number from 0"),
        ({"num_rounds": "2"}, "num_rounds is '2'; it must be a whole number from 0"),
        ({"timeout": None}, "timeout is None; it must be a number of seconds above 0"),
        ({"timeout": 0}, "timeout is 0; it must be a number of seconds above 0"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_refused(arguments, words):
    """-1 rounds returned the initial arrays; the others ended with errors of Python or numpy."""
    given = {"initial_arrays": to_record(START), "num_rounds": 1} | arguments
    for strategy in (FedAvg(), PFedHN(novel_rounds=2)):
        with pytest.raises(ValueError, match=words):
            strategy.start(clients()[0], **given)


def test_a_start_that_is_not_finite_is_no_training_that_diverged():
    with pytest.raises(RuntimeError) as error:
        FedAvg().start(clients()[0], to_record({"w": np.array([np.nan, 1], np.float32)}), 1)
    assert "the arrays that clients got are not finite, either: start from others" in str(
        error.value
    )
    assert "lower lr" not in str(error.value)


def test_records_are_named_as_one_likes():
    grid, asked = clients(keys=("parameters", "settings"))
    go(FedAvg(arrayrecord_key="parameters", configrecord_key="settings"), grid)
    assert len(asked) == 3


def test_at_least_so_many_nodes_are_sampled():
    """A tenth of ten nodes, but three to train and two to evaluate, as they are waited for."""
    grid, asked = clients(count=10)
    options = {"fraction_train": 0.1, "fraction_evaluate": 0.1, "wait": 0.1}
    go(FedAvg(min_train_nodes=3, **options), grid)
    assert len(asked) == 3
    with pytest.raises(RuntimeError, match="10 of 12 nodes"):
        go(FedAvg(min_evaluate_nodes=12, **options), clients(count=10)[0])


def test_without_evaluation():
    _, result = go(FedAvg(fraction_evaluate=0), clients()[0], rounds=2)
    assert result.evaluate_metrics_clientapp == {}
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    for value in (-0.1, 1.1):
        with pytest.raises(ValueError, match="fraction-evaluate"):
            FedAvg(fraction_evaluate=value)


def test_every_round_is_evaluated_as_in_flower():
    assert sorted(go(FedAvg(), clients()[0], rounds=2)[1].evaluate_metrics_clientapp) == [1, 2]
    ours = inspect.signature(FedAvg).parameters["evaluate_every"].default
    assert (ours, defaults()["evaluate-every"]) == (1, 5)  # an own run's is another


def test_replies_are_a_list_for_flowers_servers_and_own_aggregates():
    """Flower's FedMedian takes the first of its replies; a subclass may ask for their number."""
    content, counts = RecordDict({"arrays": to_record(START)}), []
    content["config"] = ConfigRecord({"server-round": 1})
    grid, _ = clients()
    replies = grid.send_and_receive([Message(content, node, "train") for node in (1, 2)])
    assert type(replies) is list and len(replies) == 2
    result = FedMedian(min_available_nodes=3).start(grid, to_record(START), num_rounds=1)
    assert from_record(result.arrays)["w"].tolist() == [2.0, 2.0]

    class Counting(FedAvg):
        def aggregate_train(self, server_round, replies):
            counts.append(len(replies))
            return super().aggregate_train(server_round, replies)

    assert go(Counting(), grid)[0] == pytest.approx(14 / 6)
    assert counts == [3]


def test_a_missing_query_handler_is_one_line(caplog):
    """Nodes that no engine marks as simulated log whole errors, but this is none."""
    client_app = clients()[0].client_app
    with caplog.at_level(logging.INFO):
        go(FedAvg(min_available_nodes=2), InProcessGrid(client_app, {}, [{}, {}]))
    (record,) = [r for r in caplog.records if "handler" in r.getMessage()]
    assert record.exc_info is None
    assert record.getMessage() == (
        "nodes 1, 2: no identity (its ClientApp has no handler of 'query' messages); the node id "
        "is taken as the client's id"
    )
    assert not [r for r in caplog.records if r.exc_info]


def test_the_question_may_be_left_out():
    def query(message):
        raise AssertionError("it was asked")

    strategy = FedAvg(ask=False)
    grid, _ = clients(query)
    kinds, answer = [], grid.answer

    def noted(messages, timeout):
        kinds.extend(message.metadata.message_type for message in messages)
        return answer(messages, timeout)

    grid.answer = noted
    assert go(strategy, grid)[0] == pytest.approx(14 / 6)
    assert set(kinds) == {"train", "evaluate"}
    assert [node.client for node in strategy.nodes] == [1, 2, 3]


def test_only_our_clients_are_believed():
    """Nodes 2 and 3 say that they are clients 22 and 23 with a sample; 3 says that it is ours."""

    def query(message):
        node = message.metadata.dst_node_id
        said = {"client": 20 + node, "num-examples": 1} | ({CAPABILITIES: ""} if node == 3 else {})
        if node == 1:
            return Message(RecordDict({"said": ArrayRecord()}), reply_to=message)
        return Message(RecordDict({"said": ConfigRecord(said)}), reply_to=message)

    strategy = FedAvg()
    value, result = go(strategy, clients(query)[0])
    assert [(node.client, node.foreign) for node in strategy.nodes] == [
        (1, True), (2, True), (23, False),
    ]  # fmt: skip
    assert value == pytest.approx((1 * 1 + 2 * 2 + 1 * 3) / 4)
    assert result.evaluate_metrics_clientapp[1]["size"] == pytest.approx(5 / 3)  # of 1 and 2
    assert result.evaluate_metrics_clientapp[1]["train-size"] == 3


def test_a_mixed_federation_goes_on_without_those_who_lack_something():
    """AFL with client 2 alone, which sends its risk; FedRep with client 3, which keeps its head."""
    reports = []
    strategy = AFL(on_round=reports.append)
    assert go(strategy, clients(offers={2: ""})[0])[0] == 2.0
    assert reports[0]["dropped"] == {"lacks": 2}
    strategy = FedRep(on_round=reports.append)
    grid, asked = clients(offers={1: "", 3: "personal-head more"})
    assert go(strategy, grid)[0] == 3.0
    assert asked == [(1, 3)]
    assert reports[1]["dropped"] == {"lacks": 2}


def test_a_lenient_strategy_says_what_it_is(caplog):
    with caplog.at_level(logging.WARNING, "flwr"):
        FedRep(lenient=True)
    assert "FedRep is lenient: with clients that do not train their head first" in caplog.text
    assert "it is FedAvg" in caplog.text


class Renumbered(InProcessGrid):
    """Nodes 4, 5 and 6 of six: the first three under the ids of a new start."""

    def get_node_ids(self):
        return [4, 5, 6]


@pytest.mark.parametrize(
    "kind",
    [partial(PFedHN, hidden_dim=4), partial(FedAMP, lenient=True), partial(AFL, lenient=True)],
)
def test_a_run_that_continues_with_other_ids_says_so(kind, caplog):
    """Each embedding, model or weight began anew, without a word."""
    client_app = clients()[0].client_app
    first = kind()
    first.start(InProcessGrid(client_app, {}, [{}] * 3), to_record(START), 1)

    def continue_on(grid):
        kind(former=first.state()).start(grid, to_record(START), 3)

    continue_on(InProcessGrid(client_app, {}, [{}] * 3))
    continue_on(InProcessGrid(client_app, {}, [{}] * 6))
    assert "the run that this one continues" not in caplog.text  # the same clients, and more
    continue_on(Renumbered(client_app, {}, [{}] * 6))
    assert caplog.text.count("had clients 1, 2, 3, which are not connected; clients 4, 5, 6 ") == 1


def test_an_unknown_handler_is_not_logged(caplog):
    logger = logging.getLogger("flwr")
    with caplog.at_level(logging.ERROR, "flwr"):
        with unlogged("No query function registered"):
            logger.error("ValueError: No query function registered with name 'default'")
            logger.error("something else")
        logger.error("No query function registered: later")
    assert [record.getMessage() for record in caplog.records] == [
        "something else", "No query function registered: later",
    ]  # fmt: skip


def test_numbers_of_foreign_clients():
    got = {"accuracy": 93.5, "classes": [1, 2], "client": -7, "loss": float("nan"),
            "model": "m", "flag": True, "[red]": 1, "val/acc (%)": 2, "mixed": [1, "a"],
            "wide": [1e300]}  # fmt: skip
    kept = {"accuracy": 93.5, "classes": [1, 2], "client": -7, "val/acc (%)": 2}
    assert foreign_numbers(got) == kept
    assert len(foreign_numbers({f"n{i}": i for i in range(1001)})) == 1000


def measuring(of_node):
    """Three nodes that train nothing; their evaluations measure what `of_node` returns."""
    client_app = ClientApp()

    @client_app.train()
    def train(message, context):
        content = RecordDict({"arrays": message.content["arrays"]})
        content["metrics"] = MetricRecord({"num-examples": 1})
        return Message(content, reply_to=message)

    @client_app.evaluate()
    def evaluate(message, context):
        got = MetricRecord({"num-examples": 1} | of_node(context.node_id))
        return Message(
            RecordDict({"metrics": got, "words": ConfigRecord({"a,b": "x"})}), reply_to=message
        )

    return InProcessGrid.simulation(client_app, {}, 3)


def test_a_metric_that_is_left_out_is_named(caplog):
    """Names that no metric has here, and lists of several lengths, were left out without a word;
    texts are left out as documented."""
    grid = measuring(lambda i: {"mAP@[.5:.95]": 0.5, "y" * 65: 1, "good": 0.5, "by class": [1] * i})
    _, result = go(FedAvg(), grid, rounds=2)
    assert result.evaluate_metrics_clientapp[2] == {"good": 0.5}
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(" is left out")[0] for line in lines] == [
        "the metric 'mAP@[.5:.95]'", f"the metric {'y' * 65!r}", "the metric 'by class'",
    ]  # fmt: skip
    assert "a name has at most 64 letters" in lines[0]
    assert "clients sent lists of 1, lists of 2, lists of 3; send lists of one length" in lines[2]


def test_clients_that_measure_nothing_are_said(caplog):
    """The log named `client_app`, which such clients do not have."""
    _, result = go(FedAvg(), measuring(lambda i: {}), rounds=2)
    assert result.evaluate_metrics_clientapp[2] == {}
    assert caplog.text.count("no number of theirs could be averaged; put some beside 'num-") == 1
    assert "client_app" not in caplog.text


def test_means_of_foreign_metrics_are_over_their_senders():
    """(1·2 + 3·6) / 4 = 5; of lists of different lengths there is none; without weights plain."""
    got = [{"n": 1, "a": 2.0, "b": [1]}, {"n": 3, "a": 6.0, "b": [1, 2]}, {"n": 4, "c": 7}]
    records = [RecordDict({"metrics": MetricRecord(one)}) for one in got]
    assert dict(foreign_means(records, "n")) == {"a": 5.0, "c": 7.0}
    plain = [RecordDict({"metrics": MetricRecord(one | {"n": 0})}) for one in got]
    assert dict(foreign_means(plain, "n")) == {"a": 4.0, "c": 7.0}


def test_a_strategy_may_change_its_list_of_nodes():
    """All three clients train in both rounds: twice 14 / 6."""

    class Emptying(FedAvg):
        def aggregate(self, arrays, updates):
            self.nodes.clear()
            return super().aggregate(arrays, updates)

    found, _ = go(Emptying(wait=1.0), clients()[0], rounds=2)
    assert found == pytest.approx(28 / 6)
