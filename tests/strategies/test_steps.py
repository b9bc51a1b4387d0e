"""The steps of a round by hand: sampling, sizes of updates, traffic, phases, saved states."""

import weakref

import numpy as np
import pytest
from arithmetic_clients import asked, go

from clients.core.arrays import from_record, to_record
from clients.core.protocol import RESTORE_STATE, SAVE_STATE
from fedapps.common.seeds import seed_of
from fedapps.engines.in_process_grid import InProcessGrid
from strategies.core import evaluation, receiver, round_state, run_state, strategy_hooks
from strategies.core.replies import Node, Update, most_common
from strategies.methods.fedavg import FedAvg


@pytest.mark.parametrize(("fraction", "count"), [(0.5, 2), (0.1, 1), (0.4, 1)])
def test_a_share_of_three_clients_is_rounded_and_at_least_one(fraction, count):
    """0.5 · 3 = 1.5 is 2, 0.3 is one all the same. All are evaluated, and the other way about."""
    _, heard, reports = go(FedAvg(fraction_train=fraction))
    assert len(asked(heard, "train")) == reports[0]["sampled"] == count
    assert len(asked(heard, "evaluate")) == 3
    _, heard, _ = go(FedAvg(fraction_evaluate=fraction))
    assert (len(asked(heard, "train")), len(asked(heard, "evaluate"))) == (3, count)


def test_every_draw_of_clients_has_a_generator_of_its_own(monkeypatch):
    noted = []
    monkeypatch.setattr(
        strategy_hooks, "seed_of", lambda *words: noted.append(words) or seed_of(*words)
    )
    go(FedAvg(fraction_train=0.4, fraction_evaluate=0.4, evaluate_every=1, seed=5), num_rounds=2)
    evaluated = [(5, "evaluate", client) for client in (1, 2, 3)]
    assert noted == [(5, "sample", 1), *evaluated, (5, "sample", 2), *evaluated]


def test_the_same_share_of_each_role_is_evaluated_in_every_round():
    """0.3 of ten training clients are 3, 0.3 of five novel ones 1.5, hence 2. 0.01 is one of each
    role. Another seed evaluates others; without novel clients there are the 3."""
    novel = [1, 4, 7, 10, 13]

    def evaluated(fraction, seed=0, **settings):
        strategy = FedAvg(fraction_evaluate=fraction, seed=seed, evaluate_every=1, **settings)
        nodes = asked(go(strategy, nodes=15, novel=novel, num_rounds=4)[1], "evaluate")
        count = len(nodes) // 4
        first = nodes[:count]
        assert nodes == first * 4
        assert first == sorted(set(first))
        return first

    first = evaluated(0.3)
    assert len(first) == 5
    assert len(set(first) & set(novel)) == 2
    assert len(evaluated(0.01)) == 2
    assert evaluated(0.3, seed=1) != first
    assert evaluated(0.3, evaluate_novel=False) == sorted(set(first) - set(novel))
    assert evaluated(1.0) == list(range(1, 16))
    # 7 of 15 are 4.67 of ten and 2.33 of five: 5 and 3.
    assert len(evaluated(0.01, min_evaluate_nodes=7)) == 8


def test_a_client_that_leaves_is_replaced_in_the_evaluated_sample_by_one_other():
    strategy = FedAvg(fraction_evaluate=0.3)
    nodes = [Node(i, 50 + i) for i in range(20)]
    all_there = strategy.draw_to_evaluate(nodes)
    assert len(all_there) == 6
    for gone in nodes:
        present = [node for node in nodes if node != gone]
        left = strategy.draw_to_evaluate(present)
        assert len(left) == 6
        assert len(set(left) - set(all_there)) == (gone in all_there)


def test_novel_clients_are_evaluated_only_if_asked_for():
    for wanted, nodes in ((True, [1, 2, 3]), (False, [1, 3])):
        _, heard, _ = go(FedAvg(evaluate_novel=wanted), novel=[2])
        assert asked(heard, "evaluate") == nodes
        assert asked(heard, "train") == [1, 3]


def test_accuracies_are_means_over_clients_or_over_samples():
    """1 of 1, 1 of 2 and 1 of 3 are right: (1 + ½ + ⅓) / 3 = 11/18, over samples 3/6."""
    for over, expected in (("clients", 11 / 18), ("samples", 0.5)):
        result, _, _ = go(FedAvg(average_over=over))
        assert result.evaluate_metrics_clientapp[1]["train-accuracy"] == pytest.approx(expected)


def test_replies_are_aggregated_by_client_in_whatever_order_they_come():
    class Reversed(InProcessGrid):
        def send_and_receive(self, messages, **options):
            return list(super().send_and_receive(messages, **options))[::-1]

    seen = []

    class Seen(FedAvg):
        def aggregate(self, arrays, updates):
            seen.extend(update.node.client for update in updates)
            return super().aggregate(arrays, updates)

    go(Seen(), grid=Reversed)
    assert seen == [1, 2, 3]


class Asking(FedAvg):
    """Asks for the double of w = (7, 7) before it aggregates."""

    def aggregate(self, arrays, updates):
        sent = {update.node: {"w": np.full(2, 7, np.float32)} for update in updates}
        self.doubled = self.exchange("query.double", sent)
        return super().aggregate(arrays, updates)


def test_what_is_measured_from_where_and_clipped():
    """Node i is √2·i from the (100, 100) that it was sent; at a norm of 2√2 they move by 1, 2, 2.
    What it doubles to (14, 14) is measured from zero, for itself, and never clipped."""
    strategy, seen = Asking(max_update_norm=2 * 2**0.5), {}
    usual = strategy.receiver.sizes.usual
    strategy.receiver.sizes.usual = lambda kind, norms: (
        seen.update({kind: list(norms.values())}) or usual(kind, norms)
    )
    result, _, _ = go(strategy)
    assert from_record(result.arrays)["w"].tolist() == pytest.approx([100 + 5 / 3] * 2)
    assert [update.arrays["w"].tolist() for update in strategy.doubled] == [[14, 14]] * 3
    assert seen == {
        "train": [{"": pytest.approx(i * 2**0.5)} for i in (1, 2, 3)],
        "query.double": [{"": pytest.approx(14 * 2**0.5)}] * 3,
        "evaluate": [{}] * 3,
    }


def test_a_method_may_measure_from_elsewhere():
    """From zero, as changes are: node i is at 100 + i in two entries, clipped at norm 1: √½."""

    class FromZero(FedAvg):
        def baseline_arrays(self, sent):
            return {}

    result, _, _ = go(FromZero(max_update_norm=1.0))
    assert from_record(result.arrays)["w"] == pytest.approx([0.5**0.5] * 2)


@pytest.mark.parametrize(("runs_itself", "moved"), [(True, 1.0), (False, 2.0)])
def test_a_wrapper_limits_changes_itself(runs_itself, moved):
    """Node i moves by i; at half the usual norm, that of node 2, all move by 1: three clients may
    move by twice the ratio. In a wrapper the mean is 2."""

    class Wrapped(FedAvg):
        runs_own_loop = property(lambda self: runs_itself, lambda self, value: None)

    result, _, reports = go(Wrapped(max_update_ratio=0.25))
    assert from_record(result.arrays)["w"] == pytest.approx([100 + moved] * 2)
    assert [report.get("clipped", 0) for report in reports] == [2 if runs_itself else 0]


def empty(reply):
    reply.content["arrays"] = to_record({})


def test_megabytes_are_per_client_that_was_asked_and_of_the_round_alone():
    """Two float32 down to each of three clients, up from two; a client's returned state is none of
    it, and is given back once. The bad reply counts with training, not with the evaluation."""
    strategy = FedAvg(client_states={2: {"own": np.ones(9, np.float32)}})
    _, heard, reports = go(strategy, spoil=empty, num_rounds=2)
    for report in reports:
        assert report["megabytes"] == pytest.approx({"down": 8e-6, "up": 8e-6 * 2 / 3})
        assert report["dropped"] == {"names": 1}
        assert "evaluation-dropped" not in report
    assert asked(heard, RESTORE_STATE) == [2]


class Noting(InProcessGrid):
    """Notes the nodes of each exchange, by its kind."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.exchanges = []

    def send_and_receive(self, messages, **options):
        messages = list(messages)
        self.exchanges.append([(m.metadata.message_type, m.metadata.dst_node_id) for m in messages])
        return super().send_and_receive(messages, **options)


def test_client_states_travel_in_batches(monkeypatch):
    """Two clients at once: 1 and 2, then 3. Client 1 keeps nothing; 1 and 3 get something back."""
    monkeypatch.setattr(run_state, "STATE_BATCH", 2)
    strategy = FedAvg(client_states={n: {"own": np.ones(9, np.float32)} for n in (1, 2, 3)})
    _, _, reports = go(strategy, grid=Noting)
    got = [(client, own["kept"].tolist()) for client, own in strategy.client_states()]
    assert got == [(2, [2]), (3, [3])]
    for kind in (RESTORE_STATE, SAVE_STATE):
        own = [one for one in strategy.grid.exchanges if one[0][0] == kind]
        assert own == [[(kind, 1), (kind, 2)], [(kind, 3)]]
    assert reports[0]["megabytes"] == pytest.approx({"down": 8e-6, "up": 8e-6})


def test_what_was_sent_is_gone_when_replies_are_aggregated():
    """With as many clients the messages and what is in them are as large as the replies."""

    class Sending(InProcessGrid):
        def send_and_receive(self, messages, **options):
            messages = list(messages)
            self.sent = [weakref.ref(message) for message in messages]
            return super().send_and_receive(messages, **options)

    there = []

    class Looking(FedAvg):
        def aggregate(self, arrays, updates):
            there.extend(message() for message in self.grid.sent)
            there.extend(self.now.payloads)
            return super().aggregate(arrays, updates)

    go(Looking(), grid=Sending, num_rounds=2)
    assert there == [None] * 6


def test_a_client_that_does_not_send_its_state_is_an_error(monkeypatch):
    monkeypatch.setattr(run_state, "STATE_BATCH", 2)
    strategy = FedAvg()
    go(strategy)
    silent = strategy.grid.client_app

    def app(message, context):
        if message.metadata.message_type == SAVE_STATE and context.node_id == 3:
            raise ValueError("not now")
        return silent(message, context)

    strategy.grid.client_app = app
    with pytest.raises(RuntimeError, match=r"^0 of 1 clients answered with their state$"):
        list(strategy.client_states())


def test_the_half_distance_is_half_the_mean_of_the_distances_that_are_known(monkeypatch):
    """1, 0.5 and −0.3, which counts as 0, have mean 0.5; they are asked for once, since inputs do
    not change."""
    calls = []

    def distances(exchange, novel, training):
        calls.append([[node.client for node in nodes] for nodes in (novel, training)])
        return np.array([[1.0, np.nan], [0.5, -0.3]])

    monkeypatch.setattr(evaluation, "a_distances", distances)
    result, _, _ = go(
        FedAvg(report_generalization_bound=True, evaluate_every=1),
        nodes=4,
        novel=[1, 4],
        num_rounds=2,
    )
    got = [result.evaluate_metrics_clientapp[n]["novel-half-distance"] for n in (1, 2)]
    assert got == [0.25, 0.25]
    assert calls == [[[1, 4], [2, 3]]]


class Ledger:
    """Privacy that protects by ones in place of what came, and notes who was asked."""

    expected, hides_participants, covers = 2.0, False, "model-updates"

    def __init__(self):
        self.spent = []

    def sample(self, nodes, round_):
        return [nodes[0], nodes[2]]

    def spend(self, nodes):
        self.spent.append([node.client for node in nodes])

    def protect(self, updates, arrays, round_):
        return [Update(updates[0].node, {"w": arrays["w"] + 1}, 1, {})]

    def __getattr__(self, name):
        return lambda *words: {}


def test_a_private_round_spends_for_the_asked_clients_and_writes_no_score_of_a_client():
    ledger = Ledger()
    strategy = FedAvg(privacy=ledger)
    result, heard, _ = go(strategy)
    assert ledger.spent == [asked(heard, "train")] == [[1, 3]]
    assert from_record(result.arrays)["w"].tolist() == [101, 101]
    assert strategy.evaluation == []
    open_ = FedAvg()
    go(open_)
    assert [update.node.client for update in open_.evaluation] == [1, 2, 3]


def test_secret_participants_are_not_judged_by_what_is_usual():
    """Where participants are secret all replies are kept, whatever their size."""
    strategy = FedAvg(privacy=Ledger(), max_update_norm=1e-3)
    go(strategy)
    assert strategy.now.clipped == 2
    strategy.privacy.hides_participants = True
    go(strategy)
    assert strategy.now.clipped == 0


# Replies


def nodes(*counts):
    return [
        Node(i, 50 + i, properties={"num-examples": n} if n else {}) for i, n in enumerate(counts)
    ]


def test_the_most_common_properties_and_of_ties_the_least():
    one, two = {"m": 5, "classes": 3}, {"m": 4, "classes": 9}
    some = [Node(i, 50 + i, properties=p) for i, p in enumerate((two, one, one, {"m": 1}))]
    assert most_common(some, "m", "classes") == (5, 3)
    assert most_common(some[:2], "m", "classes") == (4, 9)
    assert most_common(some[3:], "m", "classes") is None


# Time and the roster


def test_phases_follow_one_another(monkeypatch):
    """From 10 s on: 2 s until 12, then 3 until 15."""
    now = round_state.Round(started=10.0, phase_started=10.0)
    for at, phase in ((12.0, "send"), (15.0, "clients")):
        monkeypatch.setattr(round_state.time, "monotonic", lambda at=at: at)
        now.end_phase(phase)
    assert now.phases == {"send": 2.0, "clients": 3.0}


def test_a_reply_is_read_before_the_next_client_trains(monkeypatch):
    """So that a round's replies do not lie in memory twice."""
    events, read = [], receiver.read_reply

    def noted(reply, node, *given):
        events.append(("read", node.id))
        return read(reply, node, *given)

    class Asking(InProcessGrid):
        def _deliver(self, message):
            events.append((message.metadata.message_type, message.metadata.dst_node_id))
            return super()._deliver(message)

    monkeypatch.setattr(receiver, "read_reply", noted)
    go(FedAvg(), grid=Asking)
    trained = [("train", 1), ("read", 1), ("train", 2), ("read", 2), ("train", 3), ("read", 3)]
    assert events[3:9] == trained  # after three queries


@pytest.mark.parametrize(("fraction", "count"), [(0.38, 4), (0.25, 2), (0.35, 4), (0.01, 1)])
def test_a_share_of_ten_nodes_is_rounded_and_not_cut(fraction, count):
    """0.38 · 10 is 4, where Flower's FedAvg cuts it to 3; halves go to the even number."""
    strategy = FedAvg(fraction_train=fraction)
    nodes = [Node(i, i) for i in range(10)]
    assert len(strategy.draw("sample", nodes, fraction)) == count
