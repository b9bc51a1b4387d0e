from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import partitions
from clients.methods._preferences import GlobalClient, GlobalPlusClient
from clients.methods.fedembed import FedEmbedClient, triplet_step
from clients.models.preference import EmbeddingNet, PreferenceNet
from fedapps.settings.config import defaults

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
    with pytest.raises(ValueError, match="at least the 10 types"):
        client(build={"sub_populations": 5})


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
