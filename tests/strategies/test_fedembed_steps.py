"""FedEmbed's server, step by step, on replies made by hand."""

import numpy as np
import pytest
from small_runs import update

from strategies.core.replies import Node, Update
from strategies.core.round import Round
from strategies.methods.fedembed import FedEmbed


def server(**options):
    """Of a model with three heads, and embeddings of two entries."""
    strategy = FedEmbed(embedding_dim=2, **options)
    strategy.initialize({f"heads.{k}.weight": np.zeros(1, np.float32) for k in range(3)})
    return strategy


def test_a_prototype_is_the_mean_of_its_volunteers_and_stays_when_they_are_silent():
    """Users 1, 2 and 4 are of sub-population 2, user 3 of 0; there is no head 7; user 5 is none,
    nor is a novel one, whatever it says."""
    strategy = server(assignment="prototype")
    kinds = {1: 2, 2: 2, 3: 0, 4: 2, 6: 7}
    strategy.nodes = [
        Node(i, 50 + i, properties={"prototype": kinds[i]} if i in kinds else {})
        for i in range(1, 7)
    ]
    strategy.nodes.append(Node(8, 58, novel=True, properties={"prototype": 0}))
    embeddings = {1: [0.0, 1.0], 2: [0.5, 1.0], 3: [9.0, 8.0], 4: [1.0, 4.0]}
    asked = []

    def exchange(action, payloads, like):
        asked.append([node.client for node in payloads])
        got = {node: {"prototype": np.float32(embeddings[node.client])} for node in payloads}
        return [
            Update(node, arrays, 1, {})
            for node, arrays in got.items()
            if node.client in embeddings and node.client not in silent
        ]

    strategy.exchange, silent = exchange, ()
    strategy._refresh()
    assert asked == [[1, 2, 3, 4]]
    assert strategy.heads.tolist() == [0, 2] and strategy.centers.tolist() == [[9, 8], [0.5, 2]]
    silent = (1, 3, 4)
    strategy._refresh()
    assert strategy.heads.tolist() == [0, 2] and strategy.centers.tolist() == [[9, 8], [0.5, 1]]


def test_new_nodes_take_over_heads_with_their_places_on_the_grid():
    """Of the users of old node 0 most moved to new node 1, of 1 to 2, of 2 to 0: head 0 is now
    that of new node 1. Since the nodes change places, users choose once more."""
    strategy = server(assignment="som")
    old, positions = strategy.centers, strategy.positions
    new = np.float32([[1, 2], [3, 4], [5, 6]])
    nodes = [Node(i, 50 + i) for i in range(5)]
    moves = {0: (0, 1), 1: (0, 1), 2: (1, 2), 3: (2, 0), 4: (0, 0)}
    got, most = [], 99 * np.eye(3, dtype=np.int64)  # a liar's

    def exchange(action, payloads, like=None):
        got.append(next(iter(payloads.values())))
        replies = [update(9, {"overlap": most})] if len(got) == 1 else []
        for node in payloads:
            overlap = np.zeros((3, 3), np.int64)
            overlap[moves[node.client]] = 1
            replies.append(update(node.client, {"overlap": overlap}))
        return replies[: 7 - 2 * len(got)]  # at last user 3 is not heard of any more

    strategy._refitted, strategy.exchange = lambda nodes: (new, nodes), exchange
    answered = strategy._organize(nodes)
    assert [(a["old"].tolist(), a["new"].tolist()) for a in got[:1]] == [
        (old.tolist(), new.tolist())
    ]
    assert strategy.centers.tolist() == [[3, 4], [5, 6], [1, 2]]
    assert strategy.positions.tolist() == positions[[1, 2, 0]].tolist()
    assert got[1]["centers"].tolist() == [[3, 4], [5, 6], [1, 2]]
    assert got[1]["heads"].tolist() == [0, 1, 2]
    assert [node.client for node in answered] == [0, 1, 2]


V = np.float32([2, 3])


def reported_by(node, nodes, pull, v=V):
    """What a user of the embedding v answers to ``query.som``."""
    distance = np.linalg.norm(nodes - v, axis=1)
    return {"update": pull[distance.argmin()][:, None] * (v - nodes), "score": -distance}


@pytest.mark.parametrize("lie", ["score", "update", "far"])
def test_a_user_that_lies_about_its_score_does_not_win_the_map(lie):
    """User 1's score is best everywhere, or its update is not that of its score: only user 0 moves
    the map. An embedding at a distance of 900 is nobody's best either."""
    strategy = server(assignment="som")
    strategy.now, strategy.num_rounds = Round(1), 4
    strategy.pull = lambda positions, done: np.eye(3) * 0.5 + 0.1

    def exchange(action, payloads, like):
        first, second = (reported_by(node, **sent) for node, sent in payloads.items())
        second |= {
            "score": {"score": second["score"] + 500},
            "update": {"update": second["update"] * np.float32([[1], [90], [1]])},
            "far": reported_by(Node(1, 51), v=np.float32([900, 0]), **payloads[Node(1, 51)]),
        }[lie]
        return [update(0, first), update(1, second)]

    strategy.exchange = exchange
    start = strategy.centers
    centers, _ = strategy._refitted([Node(i, 50 + i) for i in range(2)])
    best = np.linalg.norm(start - V, axis=1).argmin()
    pull = np.where(np.arange(3) == best, 0.6, 0.1)[:, None]
    assert centers == pytest.approx(start + pull * (V - start), rel=1e-5)
    assert strategy.now.dropped["malformed"] == (lie in ("score", "update"))


def test_each_pass_of_the_map_starts_from_the_last_one_and_later_ones_pull_less():
    """Round 3 of 4 in two passes: 2½ and 3 of 4 rounds are done at their ends. Three users are
    asked two and one, in an order of the round's own; all have the embedding (2, 3), and a node
    that is ⅜ and then ¼ of the way from it is left."""
    strategy = server(assignment="som", som_passes=2)
    strategy.now, strategy.num_rounds = Round(3), 4
    progress, got, asked = [], [], []

    def pull(positions, done):
        progress.append(done)
        return np.full((3, 3), done)

    def exchange(action, payloads, like):
        asked.append([node.client for node in payloads])
        got.append(next(iter(payloads.values()))["nodes"])
        return [update(node.client, reported_by(node, **payloads[node])) for node in payloads]

    strategy.pull, strategy.exchange = pull, exchange
    start = strategy.centers
    centers, answered = strategy._refitted([Node(i, 50 + i) for i in range(3)])
    assert progress == [2.5 / 4, 3 / 4]
    assert np.array_equal(got[0], start)
    assert got[1] == pytest.approx(V - (V - start) * 3 / 8, rel=1e-6)
    assert centers == pytest.approx(V - (V - start) * 3 / 8 / 4, rel=1e-6)
    assert sorted(map(len, asked)) == [1, 2] and sorted(a for part in asked for a in part) == [
        0,
        1,
        2,
    ]
    assert [node.client for node in answered] == [0, 1, 2]


def test_users_choose_by_fresh_prototypes_before_they_get_the_model():
    """First the volunteers are asked, then all; who does not answer does not train."""
    strategy = server(assignment="prototype")
    nodes = [Node(0, 50, properties={"prototype": 1}), Node(1, 51), Node(2, 52)]
    strategy.nodes, asked = nodes, []

    def exchange(action, payloads, config=None, like=None):
        asked.append((action, [node.client for node in payloads]))
        if action == "train.assign":
            assert payloads[nodes[2]]["centers"].tolist() == [[0.25, 0.75]]
            return [Update(node, {}, 1, {}) for node in nodes[:2]]
        return [Update(nodes[0], {"prototype": np.float32([0.25, 0.75])}, 1, {})]

    strategy.exchange, arrays = exchange, {"w": np.zeros(1, np.float32)}
    assert list(strategy.broadcast(arrays, nodes)) == nodes[:2]
    assert asked == [("query.prototype", [0]), ("train.assign", [0, 1, 2])]
    sent = strategy.personalize(arrays, nodes)  # who is scored chooses by fresh ones, too
    assert asked[2:] == [("query.prototype", [0])]
    assert sent[nodes[2]]["assignment/centers"].tolist() == [[0.25, 0.75]]


def test_another_runs_last_evaluation_is_none_of_this_ones():
    """One that goes on from its saved model asks the volunteers before its first round; a
    resumed one, whose last round has asked them, does not."""
    for state, times in (({}, 1), ({"round": 2, "optimizers": [], "sizes": {}}, 0)):
        strategy, asked = server(assignment="prototype"), []
        (node,) = strategy.nodes = [Node(0, 50, properties={"prototype": 1})]
        strategy.arrays = {"w": np.zeros(1, np.float32)}
        strategy.now = Round(2)
        got = strategy._round_and_volunteers(2)
        kept = {"kept": {"recent": got}, "arrays": strategy.arrays}
        strategy.optimizers = list
        strategy.messenger.sizes.load_state = lambda _: None
        strategy.load_state(state | kept)
        strategy.now = Round(3)
        reply = Update(node, {"prototype": np.zeros(2, np.float32)}, 1, {})
        strategy.exchange = lambda action, *_, asked=asked, reply=reply, **__: (
            asked.append(action) or [reply]
        )
        strategy.broadcast(strategy.arrays, strategy.nodes)
        assert asked.count("query.prototype") == times


def test_every_round_asks_the_users_in_an_order_of_its_own():
    strategy = server(assignment="som", som_passes=4)
    strategy.num_rounds, orders = 9, set()
    for round_ in range(1, 7):
        strategy.now, asked = Round(round_), []
        strategy.exchange = lambda _, payloads, like, asked=asked: asked.extend(payloads) or []
        strategy._refitted([Node(i, 50 + i) for i in range(4)])
        orders.add(tuple(node.client for node in asked))
    assert len(orders) > 2 and all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_heads_on_the_server_follow_their_own_users_change():
    """Adam's first step is the rate towards the change: heads of users 0 and 1 move by ±0.1, that
    of user 2, who was not there, stays; the encoder moves by the mean of +3 and −1."""
    strategy = FedEmbed(assignment="personal", heads="server", server_lr=0.1)
    first = np.full(1, 5.0, np.float32)
    strategy.initialize({"encoder.w": first, "heads.0.w": first})
    held = [f"held/{i}/heads.0.w" for i in range(3)]
    start = dict.fromkeys(("encoder.w", *held), first)
    got = [{"encoder.w": 8.0, held[0]: 7.0, held[2]: 5.0}, {"encoder.w": 4.0, held[1]: 1.0}]
    updates = [
        update(i, {name: np.full(1, value, np.float32) for name, value in one.items()}, n=9 - 8 * i)
        for i, one in enumerate(got)
    ]
    after = strategy.aggregate(start, updates)
    moved = {name: round(float(after[name][0]) - 5, 4) for name in start}
    assert moved == {"encoder.w": 0.1, held[0]: 0.1, held[1]: -0.1, held[2]: 0.0}
