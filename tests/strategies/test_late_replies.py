"""Rounds that end before the last reply: who is late, which round uses it, and with what weight.

Nodes 1, 2, 3 take 1, 2 and 5 simulated seconds, and add 1, 2 and 3 to the model, which begins at
100. They count with 1, 1 and 2 samples."""

from dataclasses import replace
from math import sqrt
from types import SimpleNamespace

import numpy as np
import pytest
from arithmetic_clients import START, asked, society
from flwr.app import ConfigRecord
from small_runs import update

from clients.core.arrays import from_record, to_record
from fedapps.engines.in_process_grid import InProcessGrid
from strategies.core import late_replies
from strategies.core.late_replies import late_weight, rebased
from strategies.core.latency import Latency
from strategies.core.privacy import Privacy
from strategies.core.replies import Node
from strategies.methods.fedavg import FedAvg
from strategies.methods.pfedhn import PFedHN
from strategies.methods.scaffold import Scaffold

SECONDS = {1: 1.0, 2: 2.0, 3: 5.0}
SAMPLES = {1: 1, 2: 1, 3: 2}


class Given(Latency):
    """Clients with the seconds of SECONDS."""

    def seconds(self, node, nodes):
        return SECONDS[node.client]


class Drops(FedAvg):
    uses_late_replies = False


def go(kind=FedAvg, rounds=1, *, timeout=3600.0, spoil=None, former=None, **settings):
    """The model after each round, what clients heard, and the reports of the rounds."""
    client_app, heard = society(replied=SAMPLES, spoil=spoil)
    reports, models = [], []

    def on_round(report):
        reports.append(dict(report))
        models.append(float(strategy.arrays["w"][0]))

    strategy = kind(latency=Given(), on_round=on_round, former=former, **settings)
    grid = InProcessGrid.simulation(client_app, {}, 3)
    strategy.start(grid, to_record(START), num_rounds=rounds, timeout=timeout)
    strategy.models = models
    return strategy, heard, reports


def column(reports, key):
    return [report.get(key) for report in reports]


def test_a_late_reply_enters_a_later_round_as_a_change_by_its_age():
    """Two of three end round 1 at 2 s: (101 + 102) / 2 = 101.5. Node 3 works until 5 s, so round 2
    asks 1 and 2 alone, and ends at 4 s: 103. Round 3 ends at 6 s; meanwhile node 3 replied 103 to
    the 100 of round 1, a change of 3 at age 2: 103 + 3/√3. Mean of 104, 105 and twice that: 209 / 4
    + (103 + √3) / 2. Round 4 asks all three again."""
    strategy, heard, reports = go(rounds=4, round_quorum=0.6)
    third = 209 / 4 + (103 + sqrt(3)) / 2
    assert strategy.models[:2] == [101.5, 103]
    assert strategy.models[2] == pytest.approx(third, rel=1e-6)
    assert strategy.models[3] == pytest.approx(third + 1.5, rel=1e-6)
    assert column(reports, "sampled") == [3, 2, 2, 3]
    assert column(reports, "late") == [1, 0, 0, 1]
    assert column(reports, "late-used") == [0, 0, 1, 0]
    assert column(reports, "late-dropped") == [0, 0, 0, 0]
    assert column(reports, "late-age") == [None, None, 2.0, None]
    assert column(reports, "simulated-seconds") == [2, 4, 6, 8]
    # Simulated clients train when their reply is due: the second message to node 3 is not yet.
    assert asked(heard, "train") == [1, 2, 1, 2, 1, 3, 2, 1, 2]


def test_the_exponent_is_a_setting():
    """With exponent 1 the change of 3 at age 2 counts a third: 103 + 1, twice. With 0 it counts as
    it is: 103 + 3."""
    assert go(rounds=3, round_quorum=0.6, late_exponent=1.0)[0].models[2] == 104.25
    assert go(rounds=3, round_quorum=0.6, late_exponent=0.0)[0].models[2] == 105.25
    assert [late_weight(age, 0.5) for age in (0, 3, 8)] == [1, 1 / 2, 1 / 3]


def test_a_method_that_cannot_use_a_late_reply_drops_it():
    """(104 + 105) / 2 in round 3. The slow client is asked again in round 4."""
    strategy, _, reports = go(Drops, rounds=4, round_quorum=0.6)
    assert strategy.models[2] == 104.5
    assert column(reports, "late-dropped") == [0, 0, 1, 0]
    assert column(reports, "late-used") == [0, 0, 0, 0]
    assert column(reports, "sampled") == [3, 2, 2, 3]
    assert column(reports, "dropped") == [{}] * 4


@pytest.mark.parametrize("nothing", [{}, {"round_quorum": 1.0, "round_deadline": 0.0}])
def test_without_quorum_and_deadline_a_round_takes_as_long_as_the_slowest(nothing):
    """(101 + 102 + 2 · 103) / 4 = 102.25; 5 s a round."""
    strategy, _, reports = go(rounds=2, **nothing)
    assert strategy.models == [102.25, 104.5]
    assert column(reports, "simulated-seconds") == [5, 10]
    assert column(reports, "late") == [None, None]


def test_the_deadline_ends_a_round_with_what_is_there():
    """At 1.5 s node 1 alone has replied. Round 2 asks it alone, and ends with its 102 at 2.5 s. By
    then node 2's reply to 100 is there, of age 1: 101 + 2/√2. Node 3 works on."""
    strategy, _, reports = go(rounds=2, round_deadline=1.5)
    assert strategy.models[0] == 101
    assert strategy.models[1] == pytest.approx((102 + 101 + sqrt(2)) / 2, rel=1e-6)
    assert column(reports, "simulated-seconds") == [1.5, 2.5]
    assert column(reports, "late") == [2, 0]


@pytest.mark.parametrize(("least", "end", "model"), [(1, 1, 101), (2, 2, 101.5), (3, 5, 102.25)])
def test_a_deadline_ends_no_round_with_too_few_replies(least, end, model):
    """Before 0.5 s nobody replies."""
    strategy, _, reports = go(round_deadline=0.5, min_valid_replies=least)
    assert column(reports, "simulated-seconds") == [end]
    assert strategy.models == [model]


def test_a_dropped_reply_is_none_of_those_that_a_round_needs(monkeypatch):
    """Round 1 ends at 1 s with node 1. By the deadline of round 2, 1.6 s, only node 2 has replied,
    to round 1, and its reply is dropped: the round goes on until node 1 replies at 2 s."""
    monkeypatch.setitem(SECONDS, 2, 1.5)
    strategy, _, reports = go(Drops, rounds=2, round_deadline=0.6)
    assert strategy.models == [101, 102]
    assert column(reports, "simulated-seconds") == [1, 2]
    assert column(reports, "late-dropped") == [0, 1]


def test_only_valid_replies_make_the_quorum():
    """Node 1 replies NaN: the quorum of two waits for node 3. (102 + 2 · 103) / 3."""

    def spoil(reply):
        arrays = from_record(reply.content["arrays"])
        reply.content["arrays"] = to_record({n: a * np.nan for n, a in arrays.items()})

    strategy, _, reports = go(round_quorum=0.6, spoil=spoil)
    assert strategy.models == [pytest.approx(308 / 3, rel=1e-6)]
    assert column(reports, "simulated-seconds") == [5]
    assert column(reports, "dropped") == [{"not-finite": 1}]


def test_who_replies_at_the_same_second_as_the_last_is_not_late():
    """All take one second: a quorum of a third waits for nobody, and takes all."""

    class Alike(Given):
        def seconds(self, node, nodes):
            return 1.0

    reports = []
    strategy = FedAvg(round_quorum=0.33, on_round=reports.append, latency=Alike())
    client_app, _ = society()
    grid = InProcessGrid.simulation(client_app, {}, 3)
    strategy.start(grid, to_record(START), num_rounds=1)
    assert column(reports, "late") == [0]
    assert column(reports, "valid") == [3]


def test_an_exchange_within_a_round_takes_as_long_as_its_slowest_client():
    """5 s for the exchange with all three, then 2 s for the quorum. Round 2 begins at 7 s, asks the
    two that are free, and takes 2 + 2. Evaluations ask all, and take no time."""

    class Asks(FedAvg):
        def broadcast(self, arrays, nodes):
            self.exchange("query.double", dict.fromkeys(nodes, arrays))
            return super().broadcast(arrays, nodes)

        def personalize(self, arrays, nodes):
            if not self.now.training:
                self.exchange("query.double", dict.fromkeys(nodes, arrays))
            return dict.fromkeys(nodes, arrays)

    _, heard, reports = go(Asks, rounds=2, round_quorum=0.6)
    assert column(reports, "simulated-seconds") == [7, 11]
    assert asked(heard, "evaluate") == [1, 2, 3] * 2


def test_a_client_that_takes_longer_than_the_timeout_is_given_up():
    """Node 3 would reply at 5 s. At 4 s it is missing, in round 2, and round 3 asks it again."""
    _, heard, reports = go(rounds=3, round_quorum=0.6, timeout=4.0)
    assert column(reports, "sampled") == [3, 2, 3]
    assert column(reports, "dropped") == [{}, {"missing": 1}, {}]
    assert 3 not in asked(heard, "train")


def test_a_run_continues_with_what_was_on_its_way():
    """After round 2 the reply of node 3 is due, in a model that the next round does not have."""
    whole, _, _ = go(rounds=4, round_quorum=0.6)
    half, _, _ = go(rounds=2, round_quorum=0.6)
    rest, heard, reports = go(rounds=4, round_quorum=0.6, former=half.state())
    assert half.models + rest.models == whole.models
    assert asked(heard, "train") == [1, 3, 2, 1, 2]
    assert column(reports, "simulated-seconds") == [6, 8]


def test_busy_nodes_are_not_drawn_and_others_take_their_places():
    """Of ten nodes half are drawn in each round; five of the six that are free."""
    strategy = FedAvg(fraction_train=0.5, seed=3)
    strategy.nodes = [Node(i, i) for i in range(10)]
    strategy.now.number = 1
    free = strategy.sample()
    assert len(free) == 5
    busy = free[:4]
    for node in busy:
        flight = late_replies.Flight(node, 1, {}, None, 0.0, 9.0)
        strategy.late._flights.append(flight)
    again = strategy.sample()
    assert len(again) == 5
    assert not set(again) & set(busy)
    assert free[4] in again  # the order of the draw is kept


def test_a_late_change_of_another_start_by_hand():
    """x + w (y − x_s): 10 + (7 − 4) / 2 = 11.5; an array that was not sent is w y; a counter is
    rounded: 20 + (9 − 6) / 2 = 21.5 → 22."""
    y = {"w": np.float32([7]), "delta/w": np.float32([3]), "steps": np.int64([9])}
    sent = {"w": np.float32([4]), "steps": np.int64([6])}
    start = {"w": np.float32([10]), "steps": np.int64([20])}
    moved = rebased(y, sent, start, 0.5)
    assert {name: a.tolist() for name, a in moved.items()} == {
        "w": [11.5],
        "delta/w": [1.5],
        "steps": [22],
    }
    assert {name: a.dtype for name, a in moved.items()} == {name: a.dtype for name, a in y.items()}


def test_scaffold_takes_the_whole_change_of_a_late_control_variate():
    """The client's c_i has changed by all of Δc_i, and c is the mean of all c_i."""
    reply = {"delta/w": np.float32([4]), "control/w": np.float32([6])}
    moved = Scaffold().rebased(reply, {}, {}, 0.5)
    assert moved["delta/w"] == 2
    assert moved["control/w"] == 6


def test_pfedhn_descends_on_a_late_change_from_the_present_model():
    """A change Δθ at age 3 moves φ and v_i as Δθ/2 in time does: from θ_i of the present φ."""

    def moved(late):
        strategy = PFedHN(hidden_dim=3, embedding_dim=2, clip_norm=0.0, seed=1)
        strategy.nodes = [Node(0, 1), Node(1, 2)]
        strategy.arrays = strategy.initialize({"w": np.zeros(3, np.float32)})
        strategy.now.number = 1
        models = strategy.broadcast(strategy.arrays, strategy.nodes)
        sent = models[strategy.nodes[1]]
        trained = sent["w"] + np.float32([0.5, -1, 1.5])
        if late:
            strategy.broadcast(strategy.arrays, strategy.nodes[:1])  # of the next round
            (start,) = strategy.late_starts({strategy.nodes[1]: sent}).values()
            y = {"w": sent["w"] + np.float32([1, -2, 3])}
            trained = strategy.rebased(y, sent, start, late_weight(3, 0.5))["w"]
        replies = [update(0, models[strategy.nodes[0]]), update(1, {"w": trained})]
        for reply, node in zip(replies, strategy.nodes, strict=True):
            replies[node.client] = replace(reply, node=node)
        return {n: a.copy() for n, a in strategy.aggregate(strategy.arrays, replies).items()}

    in_time, late = moved(late=False), moved(late=True)
    for name, array in in_time.items():
        assert np.allclose(array, late[name], atol=1e-6), name


def test_pfedhn_drops_training_clients_replies_once_its_network_is_frozen():
    strategy = PFedHN(novel_rounds=2)
    strategy._last_training_round = 3
    strategy.now.number = 4
    assert strategy.late_starts({Node(0, 1): {}}) == {}


# Real nodes


class Slow(InProcessGrid):
    """A grid whose node 3 replies when it is asked for the third time."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.polls = {}

    def pull_messages(self, message_ids):
        due = []
        for i in message_ids:
            reply = self._replies[i]
            self.polls[i] = self.polls.get(i, 0) + 1
            if reply.metadata.src_node_id != 3 or self.polls[i] == 3:
                due.append(i)
        return super().pull_messages(due)


@pytest.fixture
def at_once(monkeypatch):
    """Nobody sleeps between two polls."""
    monkeypatch.setattr(late_replies, "POLL_SECONDS", 0.0)


def go_real(rounds, kind=FedAvg, grid=Slow, **settings):
    """The model after each round of a run without latency, what clients heard, and the reports."""
    client_app, heard = society(replied=SAMPLES)
    reports, models = [], []

    def on_round(report):
        reports.append(dict(report))
        models.append(float(strategy.arrays["w"][0]))

    strategy = kind(on_round=on_round, **settings)
    grid = grid.simulation(client_app, {}, 3)
    strategy.start(grid, to_record(START), num_rounds=rounds)
    return models, heard, reports


def test_real_nodes_are_late_by_their_own_time(at_once):
    """Node 3 replies in round 3: the numbers are those of the simulated clients above. While it is
    busy it is asked for no scores: those of round 3 are the first that it has."""
    models, heard, reports = go_real(4, round_quorum=0.6)
    assert models == go(rounds=4, round_quorum=0.6)[0].models
    assert column(reports, "late") == [1, 0, 0, 1]
    assert column(reports, "late-used") == [0, 0, 1, 0]
    assert column(reports, "simulated-seconds") == [None] * 4
    assert asked(heard, "evaluate") == [1, 2, 1, 2, 1, 2, 3, 1, 2]


def test_a_real_deadline_ends_a_round(at_once):
    """It has passed at the first poll, at which node 3 has not replied."""
    models, _, reports = go_real(1, round_deadline=1e-6)
    assert models == [101.5]
    assert column(reports, "late") == [1]


def test_a_real_node_that_does_not_reply_is_given_up(monkeypatch):
    """Between two polls 2000 s pass; the node has 3600 s. So it is missing in the second round."""
    seconds = [0.0]
    clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=lambda _: None)
    monkeypatch.setattr(late_replies, "time", clock)

    class Silent(Slow):
        def pull_messages(self, message_ids):
            seconds[0] += 2000.0
            replies = super().pull_messages(message_ids)
            return [reply for reply in replies if reply.metadata.src_node_id != 3]

    _, _, reports = go_real(3, grid=Silent, round_quorum=0.6)
    assert column(reports, "dropped") == [{}, {"missing": 1}, {}]
    assert column(reports, "sampled") == [3, 2, 3]


# Privacy


def private(**settings):
    return Privacy(dp="central", dp_noise_multiplier=1.0, dp_generator="seeded",
                   dp_covers="model-updates", rounds=2, **settings)  # fmt: skip


def test_a_quorum_would_tell_who_took_part():
    with pytest.raises(ValueError, match="leave round-quorum at its default with dp 'central'"):
        private(round_quorum=0.8)


@pytest.mark.parametrize("deadline", [1.5, 9.0])
def test_with_secret_participants_only_the_deadline_ends_a_round(deadline):
    """Whether all have replied by then or not. What is late is dropped, and nobody is busy."""
    privacy = private(fraction_train=1.0, num_clients=3, train_fraction=1.0)
    strategy, heard, reports = go(rounds=2, round_deadline=deadline, privacy=privacy)
    assert strategy.late.seconds == 2 * deadline
    assert asked(heard, "train") == ([1, 1] if deadline == 1.5 else [1, 2, 3, 1, 2, 3])
    assert not strategy.late.busy
    assert not any(key.startswith(("late", "sim")) for report in reports for key in report)
    assert privacy.state()["spent"] == {"1.0 1.0": 2}


def test_a_late_reply_costs_its_client_what_its_message_did():
    """Local privacy: three messages to nodes 1 and 2, one to node 3, whose reply round 3 uses."""
    spent = []
    privacy = Privacy(dp="local", dp_noise_multiplier=1.0, dp_covers="model-updates")
    privacy.on_spend = lambda state: spent.append(dict(state["spent"]))
    client_app, _ = society(replied={1: 1, 2: 1, 3: 1})
    strategy = FedAvg(latency=Given(), round_quorum=0.6, privacy=privacy)
    strategy.start(InProcessGrid.simulation(client_app, {}, 3), to_record(START), num_rounds=3)
    assert spent[-1]["1"] == spent[-1]["2"] == 3 * spent[-1]["3"]


# Who may not


def test_another_loop_cannot_end_rounds():
    strategy = FedAvg(round_quorum=0.6)
    with pytest.raises(ValueError, match="call its own start"):
        strategy.configure_train(1, to_record(START), ConfigRecord(), None)


# Latency


def test_seconds_are_lognormal_over_clients_and_the_same_in_every_call():
    """Median 2 and σ = 0.5 of the logarithm, of 4000 clients."""
    latency = Latency(latency="lognormal", latency_median=2.0, latency_sigma=0.5, seed=1)
    nodes = [Node(i, i) for i in range(4000)]
    seconds = np.array([latency.seconds(node, nodes) for node in nodes])
    assert np.median(seconds) == pytest.approx(2, rel=0.05)
    assert np.log(seconds).std() == pytest.approx(0.5, rel=0.05)
    assert [latency.seconds(node, nodes) for node in nodes[:9]] == seconds[:9].tolist()


def test_one_client_in_ten_is_tenfold_slower():
    """Of 20 training clients two are, and of 10 novel ones one."""
    latency = Latency(latency="lognormal", latency_sigma=0.0, latency_slow_share=0.1)
    nodes = [Node(i, i, novel=i % 3 == 0) for i in range(30)]
    seconds = {node: latency.seconds(node, nodes) for node in nodes}
    assert sorted(seconds.values()) == [1.0] * 27 + [10.0] * 3
    assert sum(seconds[node] == 10 for node in nodes if node.novel) == 1


# Limits


def test_a_late_reply_is_measured_from_the_model_that_it_started_from(monkeypatch):
    """Node 1 is slow now, and replies to 100 with a million: of its change of nearly a million,
    where others change by 2 and 3, nothing is used."""
    for node, seconds in ((1, 5.0), (2, 1.0), (3, 2.0)):
        monkeypatch.setitem(SECONDS, node, seconds)

    def spoil(reply):
        reply.content["arrays"] = to_record({"w": np.full(2, 1e6, np.float32)})

    strategy, _, reports = go(rounds=3, round_quorum=0.6, spoil=spoil)
    assert column(reports, "dropped") == [{}, {}, {"absurd": 1}]
    assert column(reports, "late-used") == [0, 0, 0]
    first = (102 + 2 * 103) / 3
    assert strategy.models[2] == pytest.approx(first + 2 * (2 + 2 * 3) / 3, rel=1e-6)
