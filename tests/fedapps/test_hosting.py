"""Many clients on a node: 7 clients on 3 nodes are to the strategies what 7 nodes are."""

import logging

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from small_runs import SMALL, Watched, bits, states

from fedapps.clientapp import app, host
from fedapps.engines.hosting import (
    ASK,
    TABLE,
    HostingApp,
    HostingGrid,
    engine_of,
    pack,
    unpack,
    unpacked,
)
from fedapps.engines.in_process_grid import InProcessGrid, Simulated
from fedapps.serverapp import run
from strategies.core.roster import Roster

HOSTED = {1: (0, 3, 6), 2: (1, 4), 3: (2, 5)}  # clients c ≡ p (mod 3), by the node of number p


def test_the_grid_tells_the_engine():
    """Even if Ray is loaded, real clients are not asked for what simulated ones report."""
    from flwr.superlink.grid import HttpGrid, InMemoryGrid  # takes a second

    assert engine_of(InMemoryGrid.__new__(InMemoryGrid)) == "flower"
    assert engine_of(HttpGrid.__new__(HttpGrid)) == "deployment"
    assert engine_of(InProcessGrid(app, {}, [])) == "deployment"  # nobody's that Flower simulates


def configuration(method, **changes):
    some = {"num-clients": 7, "train-fraction": 0.8, "fraction-train": 0.7, "rounds": 3}
    return SMALL | some | {"method": method} | changes


def on_three_nodes(config, client_app=host, grid=InProcessGrid):
    inner = grid(client_app, config, Simulated(3))
    return run(HostingGrid(inner, 7, 60.0), config, "in-process"), inner


@pytest.mark.parametrize("method", ["scaffold", "odpfl-hn", "fedper"])
def test_the_bits_are_those_of_a_node_for_each_client(method):
    config = configuration(method)
    alone = InProcessGrid.simulation(app, config, 7)
    expected = run(alone, config, "in-process")
    found, inner = on_three_nodes(config)
    assert bits(found) == bits(expected)
    kept = {}
    for context in inner.contexts.values():
        for key, record in context.state.items():
            client, own = key.split(":")
            kept[int(client) + 1, own] = {n: a.numpy().tobytes() for n, a in record.items()}
    assert kept == {
        (node, f"fedapps.{method}"): {n: a.tobytes() for n, a in state.items()}
        for node, state in states(alone, method).items()
    }


def test_a_message_carries_a_nodes_clients_and_what_they_share_once():
    """All six training clients each round: FedAvg's one model once a node, the replies' apart."""
    config = configuration("fedavg", **{"fraction-train": 1.0, "rounds": 1})
    _, inner = on_three_nodes(config, grid=Watched)
    pairs = list(zip(inner.seen[::2], inner.seen[1::2], strict=True))
    kinds = [message.metadata.message_type for message, _ in pairs]
    assert kinds == [ASK] * 3 + ["query"] * 3 + ["train"] * 3 + ["evaluate"] * 3
    trained = 0
    for message, reply in pairs[6:9]:
        got, contents = unpack(message.content)
        assert set(got["clients"]) <= set(HOSTED[message.metadata.dst_node_id])
        assert len(message.content.array_records) == 1
        assert len(reply.content.array_records) == len(contents) == len(got["clients"])
        trained += len(contents)
    assert trained == 6


def test_a_failing_client_is_its_own_error_and_its_neighbours_go_on():
    """Client 3 shares its node with clients 0 and 6."""

    def client_app(message, context):
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 3:
            raise OSError("no disk")
        return app(message, context)

    config = configuration("fedavg", **{"train-fraction": 1.0, "fraction-train": 1.0})
    got = on_three_nodes(config, HostingApp(client_app))[0].train_metrics_clientapp
    assert [got[n]["dropped-error"] for n in (1, 2, 3)] == [1, 1, 1]
    assert [got[n]["valid-replies"] for n in (1, 2, 3)] == [6, 6, 6]


LATE = {"latency": "lognormal", "latency-slow-share": 0.34, "round-quorum": 0.5}


@pytest.mark.parametrize("method", ["fedper", "pfedhn"])
def test_late_simulated_clients_give_the_same_bits(method):
    config = configuration(method, **LATE)
    expected = run(InProcessGrid.simulation(app, config, 7), config, "in-process")
    assert bits(on_three_nodes(config)[0]) == bits(expected)


def test_replies_are_pulled_as_they_arrive():
    """The reply of node 2, for clients 1 and 4, is there at the second poll."""

    class Slow(InProcessGrid):
        polls = 0

        def pull_messages(self, ids):
            self.polls += 1
            kept = {i: r for i, r in self._replies.items() if r.metadata.src_node_id == 2}
            return super().pull_messages([i for i in ids if self.polls == 2 or i not in kept])

    config = configuration("fedavg", **{"train-fraction": 1.0, "fraction-train": 1.0})
    grid = HostingGrid(Slow(host, config, Simulated(3)), 7, 60.0)
    ids = list(grid.get_node_ids())
    content = RecordDict({"config": ConfigRecord({"method": "fedavg"})})
    pushed = grid.push_messages([Message(content, i, "query") for i in ids])
    assert len(list(grid.pull_messages(pushed))) == 5
    assert len(list(grid.pull_messages(pushed))) == 2
    assert not list(grid.pull_messages(pushed))


class Leaving(InProcessGrid):
    """Node 2 is gone while round 2 is trained, and fails as lost nodes do as that begins."""

    asked = 0

    def get_node_ids(self):
        self.asked += 1
        return [i for i in self.contexts if i != 2 or self.asked not in (3, 4)]


def test_a_lost_node_loses_its_clients_alone_and_brings_them_back():
    """The roster is looked at twice a round, before training and before evaluation; node 2 hosts
    clients 1 and 4, which are missing from round 2 and come back as they were."""
    changes = {"train-fraction": 1.0, "fraction-train": 1.0, "min-available-nodes": 5}
    config = configuration("scaffold", **changes)
    result, _ = on_three_nodes(config, grid=Leaving)
    got = result.train_metrics_clientapp
    assert [got[n]["valid-replies"] for n in (1, 2, 3)] == [7, 5, 7]
    assert not any("dropped-error" in got[n] for n in got)


class Answers(InProcessGrid):
    """Sends back the replies that it is given, without any ClientApp."""

    def __init__(self, replies, count):
        super().__init__(app, SMALL, Simulated(count))
        self.replies = replies

    def _deliver(self, message):
        content = self.replies(message)
        return Message(content, reply_to=message)


def place(number, of):
    return RecordDict({"place": MetricRecord({"partition-id": number, "num-partitions": of})})


def test_who_lives_where():
    """Node 1 is number 0 of 2, node 2 number 1 of 2, node 3 says that it is alone with all: it is
    refused. Node 4, with data of its own, is one client; node 5's number is none."""
    got = {1: place(0, 2), 2: place(1, 2), 3: place(0, 1), 4: RecordDict(), 5: place(7, 7)}
    hosts = HostingGrid(Answers(lambda message: got[message.metadata.dst_node_id], 5), 5, 9.0)
    assert len(list(hosts.get_node_ids())) == 3 + 2 + 0 + 1 + 1
    assert sorted(str(home) for home in hosts._clients.values()) == [
        "(1, 0)", "(1, 2)", "(1, 4)", "(2, 1)", "(2, 3)", "(4, None)", "(5, None)",
    ]  # fmt: skip


class Late(Answers):
    """Nodes say their places; those in `there` have come."""

    def __init__(self, places):
        super().__init__(lambda message: place(*places[message.metadata.dst_node_id]), len(places))
        self.there = set()

    def get_node_ids(self):
        return sorted(self.there)


@pytest.mark.parametrize("lie", [3, 5, 10**15])
def test_nodes_that_come_late_outvote_one_of_another_number(lie, caplog):
    """Node 3 comes first and is believed until the two others are there; then its client is gone.
    Once there is work, no nodes that come outvote those that do it."""
    grid = Late({1: (0, 2), 2: (1, 2), 3: (0, lie), 4: (1, lie), 5: (2, lie)})
    hosts, seen = HostingGrid(grid, 6, 9.0), []
    with caplog.at_level(logging.WARNING, "flwr"):
        for grid.there in ({3}, {1, 2, 3}, {1, 2, 3}):
            ids = list(hosts.get_node_ids())
            seen.append([hosts._clients[i] for i in ids])
            list(hosts.send_and_receive([Message(RecordDict(), ids[0], "query")]))  # no work yet
    assert seen[0] == [(3, client) for client in range(0, 6, lie)]
    assert sorted(seen[1]) == [(node, c) for node in (1, 2) for c in range(node - 1, 6, 2)]
    assert seen[2] == seen[1]
    why = f"it says that there are {lie} nodes, most say 2"
    assert hosts.refused == {3: why}
    assert caplog.text.count(f"node 3 is refused: {why}") == 1
    ids = list(hosts.get_node_ids())
    list(hosts.send_and_receive([Message(RecordDict(), ids[0], "train")]))
    grid.there = {1, 2, 3, 4, 5}
    assert list(hosts.get_node_ids()) == ids
    assert hosts.refused.keys() == {3, 4, 5}
    grid.there = {2, 5}
    assert {hosts._clients[i][0] for i in hosts.get_node_ids()} == {2}
    assert hosts.refused.keys() == {5}


def test_too_few_clients_are_told_with_the_nodes_that_are_refused_and_why():
    """Of three nodes the first two are there, with clients 0, 3 and 1, 4, and one of two nodes."""
    hosts = HostingGrid(InProcessGrid(host, SMALL, [*Simulated(3)[:2], *Simulated(2)[:1]]), 6, 9.0)
    with pytest.raises(RuntimeError) as error:
        Roster(6, 0.0, "").present(hosts, {"method": "fedavg"}, 9.0)
    assert str(error.value) == (
        "4 of 6 nodes answered within 0 s; node 3 is refused: it says that there are 2 nodes, "
        "most say 3"
    )


@pytest.mark.parametrize(
    "content",
    [
        pack([RecordDict()], {}),  # one reply to two messages
        RecordDict({TABLE: ConfigRecord({"json": "no JSON"})}),
        RecordDict({TABLE: ConfigRecord({"json": '[{}, [{"arrays": "9"}, {}]]'})}),
        RecordDict({TABLE: ConfigRecord({"json": "[{}, [1, 2]]"})}),
        RecordDict({TABLE: ArrayRecord()}),
    ],
)
def test_a_malformed_reply_is_an_error_of_each_client(content):
    InProcessGrid(app, SMALL, [])  # messages have an identity
    sent = [Message(RecordDict(), 1, "train"), Message(RecordDict(), 2, "train")]
    replies = unpacked(Message(content, reply_to=Message(RecordDict(), 7, "train")), sent)
    assert [reply.error.reason.partition(":")[0] for reply in replies] == ["malformed reply"] * 2
