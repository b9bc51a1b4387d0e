import json

import numpy as np
import pytest
from small_runs import Watched

from clients.core.arrays import from_record
from fedapps.clientapp import app
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from strategies.core.evaluation import f1_scores, macro_f1
from strategies.core.replies import Node, Update
from strategies.methods._preferences import CentralAdam, PFedKM
from strategies.methods.fedembed import FedEmbed

SMALL = defaults() | {
    "partition": "preference",
    "num-clients": 10,
    "train-fraction": 1.0,
    "fraction-train": 0.5,
    "rounds": 2,
    "evaluate-every": 2,
    "fedembed.embedding-dim": 8,
    "fedembed.local-epochs": 1,
    "global+.embedding-dim": 8,
    "pfedkm.local-epochs": 1,
    "local-steps": 2,
    "fedrep.head-epochs": 1,
}


def updates(*values, name="a"):
    return [
        Update(Node(i, 50 + i), {name: np.array(v, np.float32)}, 10 + 20 * i, {})
        for i, v in enumerate(values)
    ]


def test_central_adams_second_step_by_hand():
    """Gradients −0.5 then −0.1 (β 0.9, 0.999): m̂ = (0.1·(−0.1) + 0.9·0.1·(−0.5)) / 0.19 = −0.28947,
    v̂ = (0.001·0.01 + 0.999·0.001·0.25) / 0.001999 = 0.129940; step 0.1·0.28947/0.360472."""
    strategy = CentralAdam(server_lr=0.1)
    x = strategy.initialize({"a": np.zeros(1, np.float32)})
    x = strategy.aggregate(x, updates([0.5]))
    new = strategy.aggregate(x, updates(x["a"] + 0.1))
    assert new["a"] == pytest.approx(x["a"] + 0.080304, abs=1e-5)


def test_all_participants_share_in_the_mean_of_a_head():
    """One of four users moved the head by 1: the gradient that Adam gets is −1/4."""
    strategy = CentralAdam()
    x = strategy.initialize({"a": np.zeros(1, np.float32)})
    strategy.aggregate(x, updates([1], [0], [0], [0]))
    assert strategy._parameters["a"].grad.tolist() == [-0.25]


def pfedkm(**settings):
    """Two clusters whose map stays where it is; heads 0 and 10."""
    strategy = PFedKM(sub_populations=2, som_rate=1e-9, som_rate_end=1e-9, **settings)
    strategy.now.number, strategy.num_rounds = 1, 1
    start = {"encoder.a": np.zeros(1, np.float32), "heads.0.w": np.zeros(1, np.float32)}
    arrays = strategy.initialize(start) | {"heads.1.w": np.full(1, 10, np.float32)}
    strategy.gradients = np.array([[1.0, 1.0], [-1.0, -1.0]])
    return strategy, arrays


def test_pfedkm_counts_a_change_of_what_was_sent_for_the_head_of_the_new_cluster():
    """Users 0 and 1 have head 1 and 2, who is new, was sent head 0 = 0. They change encoder and
    head by (1, 1), (−1, −2), (−1, −1): clusters 0, 1, 1. Means over all three: encoder −1/3,
    head 0 +1/3, head 1 (−2 − 1)/3; Adam's gradients are their opposites."""
    strategy, arrays = pfedkm()
    strategy.cluster = {0: 1, 1: 1}
    sent = strategy.personalize(arrays, [Node(i, 50 + i) for i in range(3)])
    assert [model["heads.0.w"].item() for model in sent.values()] == [10, 10, 0]
    replies = [
        Update(Node(i, 50 + i), {"encoder.a": np.float32([e]), "heads.0.w": np.float32([w])}, n, {})
        for i, (e, w, n) in enumerate([(1, 11, 5), (-1, 8, 10), (-1, -1, 30)])
    ]
    strategy.aggregate(arrays, replies)
    assert strategy.cluster == {0: 0, 1: 1, 2: 1}
    gradients = {name: p.grad.item() for name, p in strategy._parameters.items()}
    assert gradients == pytest.approx({"encoder.a": 1 / 3, "heads.0.w": -1 / 3, "heads.1.w": 1.0})


def test_pfedkms_clusters_are_those_of_the_map_that_has_learnt_from_the_round():
    """Nodes at 0 and 10, rate 1, no neighbours; changes 6 and 20. Whichever comes first, 20 takes
    node 1 with it; 6 is left with node 0, though it began nearer to node 1."""
    strategy = PFedKM(
        sub_populations=2, som_rate=1.0, som_rate_end=1.0, som_radius=0.01, som_radius_end=0.01
    )
    strategy.now.number, strategy.num_rounds = 1, 1
    arrays = strategy.initialize({"encoder.a": np.zeros(1, np.float32)})
    strategy.gradients = np.array([[0.0], [10.0]])
    changes = [np.float32([6.0]), np.float32([20.0])]
    replies = [Update(Node(i, 50 + i), {"encoder.a": c}, 1, {}) for i, c in enumerate(changes)]
    strategy.aggregate(arrays, replies)
    assert strategy.cluster == {0: 0, 1: 1}


def test_pfedkms_map_learns_by_the_schedule():
    """One node at 0 and users at 1, then again at 1: in round 2 of 4 the rate is
    0.4·(1/4)^(2/4) = 0.2: 0.2, then 0.2 + 0.2·0.8 = 0.36."""
    strategy = PFedKM(sub_populations=1, som_rate=0.4, som_rate_end=0.1)
    strategy.gradients, strategy.now.number, strategy.num_rounds = np.zeros((1, 1)), 2, 4
    strategy._fit(np.ones((2, 1)))
    assert strategy.gradients.item() == pytest.approx(0.36)


def test_a_maps_pull_by_hand():
    """Half-way rate 0.4·(1/4)^½ = 0.2 and radius 2·(1/4)^½ = 1: neighbours get 0.2 e^(−1/2)."""
    schedule = {"som_rate": 0.4, "som_rate_end": 0.1, "som_radius": 2.0, "som_radius_end": 0.5}
    pull = PFedKM(**schedule).pull(np.array([[0.0, 0.0], [0.0, 1.0]]), 0.5)
    near = 0.2 * np.exp(-0.5)
    assert pull == pytest.approx(np.array([[0.2, near], [near, 0.2]]))


def test_schedule_must_fall():
    with pytest.raises(ValueError, match="som-rate falls"):
        PFedKM(som_rate=0.1, som_rate_end=0.5)
    with pytest.raises(ValueError, match="som-radius from"):
        PFedKM(som_radius=1.0, som_radius_end=2.0)
    with pytest.raises(ValueError, match="som-passes is 0"):
        FedEmbed(som_passes=0)


def test_macro_f1_by_hand():
    """TN 3, FP 1, FN 2, TP 4: F1 of 1 is 8 / 11, of 0 is 6 / 9; mean 0.69697."""
    assert macro_f1(np.array([3, 1, 2, 4])) == pytest.approx((8 / 11 + 6 / 9) / 2)
    assert macro_f1(np.array([5, 0, 5, 0])) == pytest.approx(1 / 3)


def test_f1_is_pooled_within_sub_populations_and_then_averaged_twice():
    """Sub-population 4: [3, 1, 2, 4] in sum, F1 a = (8/11 + 6/9)/2 of two users; 7: a constant
    answer, 1/3, of one. Means: (a + 1/3)/2 over sub-populations, (2a + 1/3)/3 over users. A novel
    user of 4, all right, is reported separately and changes neither."""
    got = [([2, 0, 0, 2], 4), ([1, 1, 2, 2], 4), ([5, 0, 5, 0], 7), (None, 7), ([5, 0, 0, 5], 4)]
    replies = [
        Update(Node(i, 50 + i, i == 4), {}, 1, {"counts": c, "sub-population": k} if c else {})
        for i, (c, k) in enumerate(got)
    ]
    a = (8 / 11 + 6 / 9) / 2
    training = {"f1": (a + 1 / 3) / 2, "f1-users": (2 * a + 1 / 3) / 3, "f1-4": a, "f1-7": 1 / 3}
    expected = {f"train-{key}": f1 for key, f1 in training.items()}
    expected |= dict.fromkeys(("novel-f1", "novel-f1-users", "novel-f1-4"), 1.0)
    assert f1_scores(replies) == pytest.approx(expected)
    assert f1_scores(replies[3:4]) == {}


@pytest.mark.parametrize("assignment", ["prototype", "som", "personal", "type"])
def test_no_message_holds_an_embedding_but_a_volunteers(assignment):
    config = SMALL | {"method": "fedembed", "fedembed.assignment": assignment}
    grid = Watched.simulation(app, config, 10)
    result = run(grid, config, "in-process")
    embeddings = []
    for context in grid.contexts.values():
        for record in context.state.array_records.values():
            embeddings.append(from_record(record)["personal/embedding"])
    assert len(embeddings) >= 5
    volunteered = 0
    for message in grid.seen:
        assert not message.has_error()
        for record in message.content.array_records.values():
            for name, array in from_record(record).items():
                volunteered += name == "prototype"
                assert "embedding" not in name
                if name in ("prototype", "centers", "assignment/centers"):
                    continue
                assert not any(np.isin(v, array).all() for v in embeddings)
    assert (volunteered > 0) == (assignment == "prototype")
    assert 0 <= result.evaluate_metrics_clientapp[2]["train-f1"] <= 1


PRIVATE = {"dp-noise-multiplier": 1.0, "dp-clip": 0.01, "dp-generator": "seeded"}


@pytest.mark.parametrize("mode", ["local", "central"])
@pytest.mark.parametrize("method", ["fedembed", "fedrep", "pfedme", "pfedkm"])
def test_private_runs_keep_their_clip_and_ask_nothing_else(method, mode):
    own = {"method": method, "model": "preference-net", "fedembed.assignment": "type", "dp": mode}
    config = SMALL | PRIVATE | own
    grid = Watched.simulation(app, config, 10)
    if (method, mode) == ("pfedkm", "central"):
        with pytest.raises(ValueError, match="pfedkm cannot keep dp 'central'; able: fedavg"):
            run(grid, config, "in-process")
        return
    run(grid, config, "in-process")
    assert {m.metadata.message_type for m in grid.seen} == {"query", "train"}
    trained = [m for m in grid.seen if m.metadata.message_type == "train" and m.has_content()]
    replies = {m.metadata.reply_to_message_id: m for m in trained if m.metadata.reply_to_message_id}
    assert len(replies) >= 3
    for sent in trained:
        reply = replies.get(sent.metadata.message_id)
        if reply is None:
            continue
        x = from_record(next(iter(sent.content.array_records.values())))
        y = from_record(next(iter(reply.content.array_records.values())))
        change = np.concatenate([(y[n].astype(float) - x[n]).ravel() for n in x])
        expected = 0.01 if mode == "central" else 0.01 * np.sqrt(len(change))
        assert np.linalg.norm(change) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("assignment", "named"),
    [("prototype", "embeddings and sub-populations of prototypical"), ("som", "every user's emb")],
)
def test_an_assignment_that_noise_does_not_cover_must_be_said_and_is_named(
    assignment, named, tmp_path
):
    own = {"method": "fedembed", "fedembed.assignment": assignment, "dp": "central"}
    config = SMALL | PRIVATE | own | {"output-dir": str(tmp_path), "train-fraction": 1.0}
    with pytest.raises(ValueError, match=f"{named}.* would leave the clients without noise"):
        run(Watched.simulation(app, config, 10), config, "in-process")
    config |= {"dp-covers": "model-updates"}
    run(Watched.simulation(app, config, 10), config, "in-process")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert f"not covered: {named}" in summary["privacy"]["terms"]
    assert "scores of evaluations" in summary["privacy"]["terms"]
    assert summary["train"]["f1"] > 0
    assert summary["per_client"] == {}
    assert summary["dropped_replies"] is None
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        kept = {key for key in json.loads(line) if not key.startswith("dp-")}
        assert kept <= {"round", "evaluation"}
