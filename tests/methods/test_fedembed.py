"""FedEmbed and pFedKM: losses, prototypes and maps by hand, on the client and on the server."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import Watched, fedapps, update
from torch import nn
from torch.nn import functional as F

import partitions
from clients.core.arrays import from_record
from clients.methods._preferences import GlobalClient, GlobalPlusClient
from clients.methods.fedembed import FedEmbedClient, triplet_step
from clients.models import build_model
from clients.models.head import ForeignNetwork
from clients.models.preference import EmbeddingNet, PreferenceNet
from fedapps.clientapp import app
from fedapps.serverapp import run
from fedapps.settings.config import defaults
from strategies.core.evaluation import f1_scores, macro_f1
from strategies.core.replies import Node, Update
from strategies.core.round_state import Round
from strategies.methods._preferences import CentralAdam, PFedKM
from strategies.methods.fedembed import FedEmbed

CONFIG = defaults() | {"partition": "preference", "num-clients": 20, "train-fraction": 1.0}
DIM = 8


def client(cls=FedEmbedClient, number=0, build=None, **options):
    federation = partitions.federation(CONFIG)
    info = federation.info
    torch.manual_seed(0)
    build = {} if cls is GlobalClient else {"embedding_dim": DIM} | (build or {})
    if "assignment" in options:
        build["assignment"] = options["assignment"]
    net = cls.build_network(None, info, model="preference-net", seed=0, **build)
    options = {"lr": 0.001, "local_epochs": 5, "batch_size": 20} | options
    return cls(net, federation.share(number), client=number, seed=7, **options)


def moved(one, name):
    """Names of the parameters that get a gradient from the loss `name` alone."""
    one.load({})
    x, y = one.share.train[:]
    one.model.zero_grad(set_to_none=True)
    one.losses(x, y, one.share.train.types(slice(None)))[name].backward()
    return {n for n, p in one.model.named_parameters() if p.grad is not None and p.grad.any()}


ENCODER = {f"encoder.{layer}.{kind}" for layer in ("conv1", "conv2", "fc")
           for kind in ("weight", "bias")}  # fmt: skip


def head(name):
    return {f"{name}.weight", f"{name}.bias"}


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        ("head", ENCODER | head("heads.3") | {"embedding"}),
        ("type", ENCODER | head("type_head") | {"embedding"}),
        ("global", head("global_head") | {"embedding"}),
    ],
)
def test_each_loss_moves_exactly_its_parameters(loss, names):
    one = client(assignment="type")
    one.k = 3
    assert moved(one, loss) == names


@pytest.mark.parametrize("through", ["features", "input"])
def test_the_global_loss_reaches_the_embedding_by_the_chosen_paths(through):
    """Against finite differences in float64 of CE(Θ_g(f(x, diag(v)), v)) in each entry of v: of
    both places of v with "input", of the second one alone with "features". Its value is the same,
    and only Θ_g and v get a gradient."""
    one = client(assignment="type", global_gradient=through)
    assert moved(one, "global") == head("global_head") | {"embedding"}
    net = one.model.double()
    x, y = one.share.train[:]
    x = x.double()
    types = one.share.train.types(slice(None))
    net.zero_grad()
    loss = one.losses(x, y, types)["global"]
    loss.backward()
    v = net.embedding.detach().clone()

    def value(at_input, appended):
        with torch.no_grad():
            net.embedding.copy_(at_input)
            features = net.features(x)
            net.embedding.copy_(appended)
            return F.cross_entropy(net.global_head(net.conditioned(features)), y).item()

    assert loss.item() == pytest.approx(value(v, v), rel=1e-12)
    for i in range(DIM):
        step = torch.zeros(DIM, dtype=torch.float64)
        step[i] = 1e-6
        at_input = step if through == "input" else torch.zeros(DIM)
        slope = (value(v + at_input, v + step) - value(v - at_input, v - step)) / 2e-6
        assert net.embedding.grad[i].item() == pytest.approx(slope, rel=1e-4, abs=1e-9)


def test_a_second_pass_of_the_encoder_leaves_its_running_statistics():
    """One pass of training moves a running mean of 0 by a tenth of the batch's mean; also if the
    global head's loss takes a pass of its own."""
    encoder = ForeignNetwork(nn.Sequential(nn.BatchNorm2d(2), nn.Flatten()), nn.Linear(32, 2))
    net = EmbeddingNet(encoder, (1, 4, 4), dim=2, heads=1).train()
    x = torch.rand(4, 1, 4, 4)
    net.features(x)
    mean = net.encoder.body[0].running_mean.clone()
    assert mean[0].item() == pytest.approx(0.1 * x.mean().item())
    net.features_of_fixed(x)
    assert torch.equal(net.encoder.body[0].running_mean, mean)


def test_losses_are_the_cross_entropies_of_the_three_heads():
    one = client()
    one.load({})
    x, y = one.share.train[:]
    types = one.share.train.types(slice(None))
    one.k = 2
    losses = one.losses(x, y, types)
    net, v = one.model, torch.from_numpy(one.embedding())
    channel = torch.zeros(20, 1, 8, 8)
    channel[:, 0] = torch.diag(v)  # 8 × 8 images and 8 entries
    features = net.encoder.features(torch.cat([x, channel], 1))
    inputs = torch.cat([features, v.expand(20, DIM)], 1)
    assert losses["head"].item() == pytest.approx(F.cross_entropy(net.heads[2](inputs), y).item())
    assert losses["type"].item() == pytest.approx(
        F.cross_entropy(net.type_head(inputs), types).item()
    )
    assert losses["global"].item() == pytest.approx(
        F.cross_entropy(net.global_head(inputs), y).item()
    )


def test_embedding_is_padded_to_the_image_and_its_gradient_is_right():
    """Finite differences in float64 of the head's loss in one entry of v."""
    net = EmbeddingNet(PreferenceNet((2, 12, 10), 2), (1, 12, 10), dim=3, heads=1).double()
    torch.manual_seed(1)
    x, y = torch.rand(4, 1, 12, 10, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    with torch.no_grad():
        net.embedding.copy_(torch.tensor([0.3, 0.6, 0.9]))
    F.cross_entropy(net(x), y).backward()
    values = []
    for h in (1e-6, -1e-6):
        with torch.no_grad():
            net.embedding[1] = 0.6 + h
            values.append(F.cross_entropy(net(x), y).item())
    assert net.embedding.grad[1].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)


def test_embedding_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match=r"images .* inputs have the shape \(12,\)"):
        EmbeddingNet(build_model("mlp", (12,), 2, 0), (12,), dim=4, heads=2)
    with pytest.raises(ValueError, match="embedding-dim is 9"):
        client(build={"embedding_dim": 9})


def test_embedding_is_drawn_by_the_user_and_persists():
    one, other = client(number=1), client(number=2)
    v = one.embedding()
    assert v.shape == (DIM,)
    assert 0 <= v.min() <= v.max() < 1
    assert (v != other.embedding()).any()
    shared = {n: a for n, a in one.initial.items() if not one.is_personal(n)}
    one.train(shared, {"server-round": 1})
    later = client(number=1)
    later.state = one.state
    assert (later.embedding() == one.state["personal/embedding"]).all()
    assert (later.embedding() != v).any()


def test_adam_steps_are_the_librarys():
    """First step of Adam: every entry moves by lr · g / (|g| + eps), about lr against its sign."""
    one = client(GlobalClient, local_epochs=0, local_steps=1, lr=0.01)
    reply, _, _ = one.train(dict(one.initial), {"server-round": 1})
    change = reply["heads.0.bias"] - one.initial["heads.0.bias"]
    assert np.abs(change) == pytest.approx([0.01, 0.01], rel=1e-3)
    assert change[0] == pytest.approx(-change[1])


def test_embedding_has_a_rate_of_its_own():
    one = client(GlobalPlusClient, local_epochs=0, local_steps=1, lr=0.0, embedding_lr=0.05)
    v = one.embedding().copy()
    shared = {n: a for n, a in one.initial.items() if n != "embedding"}
    reply, _, _ = one.train(shared, {"server-round": 1})
    assert all((reply[n] == shared[n]).all() for n in reply)
    assert np.abs(one.embedding() - v) == pytest.approx([0.05] * DIM, rel=1e-3)


def test_triplet_step_by_hand():
    """v = (1, 0), p_k = (0, 0), p_n = (0, 1), α = 1: 1 − 2 + 1 = 0 is not active; from α = 1.5
    on the gradient is 2 (p_n − p_k) = (0, 2), so lr 0.1 gives (1, −0.2)."""
    v, p_k, p_n = np.array([1.0, 0.0]), np.array([0.0, 0.0]), np.array([0.0, 1.0])
    assert triplet_step(v, p_k, p_n, 1.0, 0.1).tolist() == [1, 0]
    assert triplet_step(v, p_k, p_n, 1.5, 0.1) == pytest.approx([1, -0.2])


def test_som_reply_by_hand():
    """v = (1, 2), nodes (0, 0) and (1, 1): distances √5 and 1, so node 1 is best; its pulls 0.25
    and 0.5 of v − m: (0.25, 0.5) and (0, 0.5)."""
    one = client(assignment="som")
    one.state["personal/embedding"] = np.array([1.0, 2.0])
    nodes, pull = np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([[0.5, 0.1], [0.25, 0.5]])
    reply, _ = one.som({"nodes": nodes, "pull": pull}, {})
    assert reply["score"] == pytest.approx([-(5**0.5), -1])
    assert reply["update"].tolist() == [[0.25, 0.5], [0, 0.5]]
    overlap, _ = one.assign({"old": nodes, "new": nodes[::-1]}, {})
    assert overlap["overlap"].tolist() == [[0, 0], [1, 0]]
    assert int(one.state["head"]) == 0


def test_a_local_pass_trains_the_head_of_the_last_assignment():
    """Head 6, neither the true sub-population's nor the first."""
    one = client(number=5)
    one.state["head"] = np.array(6)
    shared = {n: a for n, a in one.initial.items() if not one.is_personal(n)}
    reply, _, _ = one.train(shared, {"server-round": 1})
    changed = {n for n, a in reply.items() if n.startswith("heads.") and (a != shared[n]).any()}
    assert changed == head("heads.6")
    assert one.share.attributes["sub-population"] not in (0, 6)


def test_who_is_scored_takes_the_nearest_centers_head():
    """v = 0 and centers at distances √8·(3, 1, 2) of the heads 7, 2, 5: the second one's, head 2,
    whichever the last assignment was; with `type` the true one's."""
    got = {"centers": np.array([[3.0], [1.0], [2.0]]) * np.ones(DIM), "heads": np.array([7, 2, 5])}
    arrays = {f"assignment/{name}": a for name, a in got.items()}
    for assignment, expected in (("prototype", 2), ("som", 2), ("type", None)):
        one = client(number=5, assignment=assignment)
        one.state |= {"personal/embedding": np.zeros(DIM, np.float32), "head": np.array(7)}
        shared = {n: a for n, a in one.initial.items() if not one.is_personal(n)}
        one.receive(shared | (arrays if expected else {}), {})
        assert one.k == (expected or one.share.attributes["sub-population"])


def test_an_assignment_takes_the_nearest_centers_head():
    """v = 0 is nearest to the second center, of head 2; without a center of its own type positives
    pull it nowhere. Who clusters by a map is never pulled."""
    centers = (np.array([[3.0], [1.0], [2.0]]) * np.ones(DIM)).astype(np.float32)
    for assignment, heads in (("prototype", [7, 2, 5]), ("som", [7, 2, 3])):
        one = client(assignment=assignment)
        assert one.share.attributes["sub-population"] == 3
        one.state["personal/embedding"] = np.zeros(DIM, np.float32)
        one.assign({"centers": centers, "heads": np.array(heads)}, {"server-round": 1})
        assert int(one.state["head"]) == 2
        assert not one.state["personal/embedding"].any()


def test_every_positive_sample_pulls_once_and_from_another_types_prototype():
    """Half of the 20 samples are positive; of two prototypes one is the user's own type's, so each
    of ten steps is −η·2(p_n − p_k) = −0.01·2·((1, …) − (4, …)) = 0.06 in every entry."""
    one = client(triplet_lr=0.01, margin=1e6)
    assert one.share.attributes["sub-population"] == 3
    v = one.embedding().copy()
    centers = (np.array([[1.0], [4.0]]) * np.ones(DIM)).astype(np.float32)
    one.assign({"centers": centers, "heads": np.array([8, 3])}, {"server-round": 1})
    assert one.embedding() - v == pytest.approx([0.6] * DIM, rel=1e-4)


def test_a_novel_user_does_not_volunteer():
    one = client()
    assert one.get_properties({})["prototype"] == 3
    one.share = replace(one.share, novel=True)
    assert "prototype" not in one.get_properties({})


def test_a_pass_tells_the_loss_of_the_users_head_and_learns_the_samples_types():
    """One step over all 20 samples: what is reported is head 6's cross entropy before it."""
    one = client(local_epochs=0, local_steps=1, batch_size=20)
    one.state["head"] = np.array(6)
    shared = {n: a for n, a in one.initial.items() if not one.is_personal(n)}
    seen, losses = [], one.losses

    def watched(x, y, types):
        found = losses(x, y, types)
        seen.append((types.tolist(), found["head"].item()))
        return found

    one.losses = watched
    _, _, metrics = one.train(shared, {"server-round": 1})
    ((types, loss),) = seen
    assert sorted(types) == sorted(one.share.train.types(slice(None)).tolist())
    assert metrics["loss"] == pytest.approx(loss)


def test_predictions_and_the_served_network_are_of_the_users_head():
    one = client()
    one.load({})
    one.k, x = 2, one.share.train[:][0]
    with torch.no_grad():
        each = [one.model(x, k) for k in range(3)]
        assert torch.equal(one.predict(x), each[2])
        assert torch.allclose(one.personal_model(x)(x), each[2])
    assert not torch.allclose(each[2], each[0])


def test_weight_decay_is_in_adams_gradient():
    """g + λw with a large λ has the sign of w: Adam's first step is −lr · sign(w)."""
    one = client(GlobalClient, local_epochs=0, local_steps=1, lr=0.01)
    one.weight_decay = 1e6  # more than a run may ask for
    reply, _, _ = one.train(dict(one.initial), {"server-round": 1})
    w = one.initial["heads.0.weight"]
    large = np.abs(w) > 1e-3
    change = (reply["heads.0.weight"] - w)[large]
    assert change == pytest.approx(-0.01 * np.sign(w[large]), rel=1e-3)


def test_volunteers_are_the_first_users_of_each_sub_population():
    got = {}
    for number in range(20):
        one = client(number=number)
        kind, rank = (one.share.attributes[key] for key in ("sub-population", "rank"))
        got[kind, rank] = one.get_properties({}).get("prototype")
        if rank:
            with pytest.raises(ValueError, match="not prototypical"):
                one.prototype({}, {})
        else:
            assert (one.prototype({}, {})[0]["prototype"] == one.embedding()).all()
    assert got == {(k, r): (k if r == 0 else None) for k in range(10) for r in range(2)}


def test_more_sub_populations_than_types():
    """20 heads for 10 types: the second users stand for heads 10 … 19."""
    got = set()
    for number in range(20):
        one = client(number=number, build={"sub_populations": 20})
        got.add(one.get_properties({})["prototype"])
    assert got == set(range(20))


@pytest.mark.parametrize("assignment", ["prototype", "type", "personal"])
def test_fewer_heads_than_types_need_a_map(assignment):
    with pytest.raises(ValueError, match=f"is 5, and assignment is '{assignment}'.* the 10 types"):
        client(build={"sub_populations": 5}, assignment=assignment)


def test_a_map_has_fewer_nodes_than_there_are_types():
    """Three nodes for ten types: each user has the head of its nearest node after a round."""
    config = CONFIG | {"method": "fedembed", "rounds": 1, "fraction-train": 1.0}
    config |= {"model": "preference-net", "local-epochs": 1, "fedembed.embedding-dim": DIM}
    config |= {"fedembed.assignment": "som", "fedembed.sub-populations": 3}
    grid = Watched.simulation(app, config, 20)
    result = run(grid, config, "in-process")
    names = {name for name in from_record(result.arrays) if name.startswith("heads.")}
    assert names == head("heads.0") | head("heads.1") | head("heads.2")
    nodes = grid.seen
    assigned = [m for m in nodes if m.metadata.message_type == "train.assign"]
    maps = from_record(assigned[0].content.array_records["arrays"])
    assert maps["new"].shape == (3, DIM)


def test_personal_head_stays():
    one = client(assignment="personal")
    assert {"own.weight", "own.bias", "embedding"} == {n for n in one.initial if one.is_personal(n)}
    assert moved(one, "head") == ENCODER | head("own") | {"embedding"}


def test_unknown_assignment_and_wrong_partition_are_named():
    with pytest.raises(ValueError, match="'best'; known: prototype"):
        client(build={"assignment": "best"})
    plain = partitions.federation(defaults()).share(0)
    with pytest.raises(ValueError, match="set partition to 'preference'"):
        GlobalClient(client(GlobalClient).model, plain)


SMALL_RUN = defaults() | {
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
    config = SMALL_RUN | {"method": "fedembed", "fedembed.assignment": assignment}
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
    config = SMALL_RUN | PRIVATE | own
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
    config = SMALL_RUN | PRIVATE | own | {"output-dir": str(tmp_path), "train-fraction": 1.0}
    with pytest.raises(ValueError, match=f"{named}.* would leave the clients without noise"):
        run(Watched.simulation(app, config, 10), config, "in-process")
    config |= {"dp-covers": "model-updates"}
    run(Watched.simulation(app, config, 10), config, "in-process")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert f"not covered: {named}" in summary["privacy"]["terms"]
    assert "scores of evaluations" in summary["privacy"]["terms"]
    assert summary["evaluation"]["train-f1"] > 0
    assert summary["per_client"] == {}
    assert summary["dropped_replies"] is None
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        kept = {key for key in json.loads(line) if not key.startswith("dp-")}
        assert kept <= {"round", "evaluation"}


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
        strategy.receiver.sizes.load_state = lambda _: None
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


def test_users_may_have_tastes_for_the_classes_of_a_users_own_images(tmp_path):
    """Ten classes of images, which users like or not: labels of samples are types, not outputs."""
    draw = np.random.default_rng(0)
    file = tmp_path / "images.npz"
    np.savez(file, x=draw.random((300, 1, 8, 8), np.float32), y=np.arange(300) % 10)
    method = "fedembed embedding-dim=8 local-epochs=1"
    own = [f"dataset={file}", "partition=preference", "num-clients=6", "rounds=1"]
    done = fedapps("run", "--methods", method, *own, "--engine", "in-process", "--output", tmp_path)
    assert "failed" not in done
