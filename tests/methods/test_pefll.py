"""PeFLL's client: labeled descriptors by hand, their gradient, and who is described by what."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import federate, share

from clients.core.arrays import model_arrays, to_numpy
from clients.methods.odpfl_hn import DESCRIPTOR, ODPFLHNClient
from clients.methods.pefll import PeFLLClient
from clients.models import build_model
from partitions.datasets.loading import Info

SIZES = {"num_clients": 20, "train_fraction": 0.5}


def client(shape, x, y, dim=2, **settings):
    torch.manual_seed(0)
    target = build_model("mlp-small" if len(shape) == 1 else "convnet-small", shape, 3, 0)
    model = PeFLLClient.build_network(
        target, Info("tiny", shape, 3, ""), descriptor_dim=dim, **SIZES
    )
    return PeFLLClient(model, share(x, y), client=3, **settings)


def gamma(of):
    return to_numpy(dict(of.model.encoder.named_parameters(prefix="encoder")))


def test_a_label_stands_beside_its_input_as_one_hot_channels():
    """Of three classes, label 2 of a vector (5, 6) and label 0 of a picture of one grey value."""
    vector = client((2,), torch.zeros(1, 2), [0])
    got = vector.encoder_input(torch.tensor([[5.0, 6.0]]), torch.tensor([2]))
    assert got.tolist() == [[5, 6, 0, 0, 1]]
    picture = client((1, 8, 8), torch.zeros(1, 1, 8, 8), [0])
    got = picture.encoder_input(torch.full((1, 1, 8, 8), 7.0), torch.tensor([0]))
    assert [got[0, c].unique().tolist() for c in range(4)] == [[7], [1], [0], [0]]


def test_the_descriptor_by_hand():
    """φ(x, y) = out(x₁ + 10·[y = 1]): its hidden layers pass that on as their first unit, and out
    is (z, −2z). Samples (1, label 0), (4, label 1), (5, label 1): z = 1, 14, 15, mean 10."""
    one = client((2,), torch.tensor([[1.0, 9.0], [4.0, 9.0], [5.0, 9.0]]), [0, 1, 1])
    sent = {name: np.zeros_like(array) for name, array in gamma(one).items()}
    sent["encoder.fc.0.weight"][0] = [1, 0, 0, 10, 0]
    sent["encoder.fc.2.weight"][0, 0] = 1
    sent["encoder.out.weight"][:, 0] = [1, -2]
    reply, _ = one.encode(sent, {})
    assert reply[DESCRIPTOR].tolist() == pytest.approx([10, -20])


def test_backprop_is_the_gradient_of_the_labeled_encoding():
    """⟨g_γ, d⟩ against central differences of ⟨g_e, encode(γ + t d)⟩ along a random d."""
    rng = np.random.default_rng(0)
    one = client((1, 8, 8), torch.rand(5, 1, 8, 8, generator=torch.manual_seed(0)), [0, 1, 2, 2, 2])
    one.model.double()
    one.model.encoder.register_forward_pre_hook(lambda _, x: (x[0].double(),))
    now, g_e = gamma(one), rng.normal(size=2)
    found, _ = one.backprop(now | {DESCRIPTOR: g_e}, {})
    along = {name: rng.normal(size=a.shape) for name, a in now.items()}

    def at(t):
        moved = {name: a + t * along[name] for name, a in now.items()}
        return float(g_e @ one.encode(moved, {})[0][DESCRIPTOR])

    slope = (at(1e-7) - at(-1e-7)) / 2e-7
    assert sum((found[n] * along[n]).sum() for n in now) == pytest.approx(slope, rel=1e-5)


def test_a_novel_client_is_served_by_the_labels_that_it_shows_alone():
    for shots, served in ((0, None), (2, 3)):
        result, _ = federate(method="pefll", rounds=1, **{"novel-shots": shots})
        assert result.evaluate_metrics_clientapp[1].get("novel-clients") == served
    with pytest.raises(ValueError, match="has no labels"):
        client((2,), torch.zeros(0, 2), torch.zeros(0).long()).described()


def test_labels_in_rounds_of_their_own_are_refused():
    with pytest.raises(ValueError, match="a descriptor serves novel clients at once"):
        federate(method="pefll", **{"novel-rounds": 2})


@pytest.mark.parametrize("novel", [False, True])
def test_the_descriptor_is_of_the_training_samples_alone(novel):
    """Rows 0 and 2 are for training (or what a novel client shows); row 1, of validation (or what
    is scored), has no say. ODPFL-HN, which sees no labels, describes all of a novel client's."""
    x = torch.tensor([[1.0], [2.0], [3.0]])
    one = client((1,), x, [0, 1, 2])
    whole = one.share.everything
    own = replace(one.share, train=replace(whole, index=torch.tensor([0, 2])), novel=novel)
    one.share = own
    assert one.described().index.tolist() == [0, 2]
    unlabeled = ODPFLHNClient.described(one).index.tolist()
    assert unlabeled == ([0, 1, 2] if novel else [0, 2])


def test_a_descriptor_has_one_entry_more_than_a_quarter_of_all_clients():
    """Of twelve clients 1 + 12 // 4 = 4, of 13 as many, of 16 five; with 0.8 of twelve training
    (10), ODPFL-HN's are ⌈10/4⌉ = 3."""
    info, net = Info("tiny", (2,), 3, ""), build_model("mlp-small", (2,), 3, 0)

    def size(cls, clients):
        network = cls.build_network(net, info, num_clients=clients, train_fraction=0.8)
        return network.encoder.out.out_features

    assert [size(PeFLLClient, n) for n in (12, 13, 16)] == [4, 4, 5]
    assert size(ODPFLHNClient, 12) == 3


@pytest.mark.parametrize("mask", [True, False])
def test_logits_of_absent_classes_are_zero_when_it_is_scored(mask):
    """Labels 0 and 2 of three classes; with the head's bias (−3, −2, −1) and weights 0, class 1 has
    the largest logit once it is masked. The model that it would deliver says the same."""
    one = client((2,), torch.rand(4, 2), [0, 2, 2, 0], mask_absent=mask)
    sent = {f"target.{n}": np.zeros_like(a) for n, a in model_arrays(one.target).items()}
    sent["target.head.bias"][:] = [-3, -2, -1]
    one.receive(sent, {})
    expected = [-3.0, 0.0, -1.0] if mask else [-3.0, -2.0, -1.0]
    assert one.predict(torch.rand(1, 2))[0].tolist() == expected
    assert one.personal_model(torch.rand(1, 2))(torch.rand(1, 2))[0].tolist() == expected


def test_a_mini_batchs_gradient_is_clipped():
    """One step of lr 0.5 from zeros without momentum: the loss's gradient with respect to the
    head's bias is softmax − one-hot = (1/3, 1/3, −2/3), of norm √6/3 ≈ 0.8165; clipped to 0.1 the
    step is 0.5 · 0.1 = 0.05 long."""
    settings = {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "local_steps": 1}
    for norm, length in ((0.1, 0.05), (50.0, 0.5 * 6**0.5 / 3), (0.0, 0.5 * 6**0.5 / 3)):
        one = client((2,), torch.rand(4, 2), [2] * 4, **settings, local_clip_norm=norm)
        sent = {f"target.{n}": np.zeros_like(a) for n, a in model_arrays(one.target).items()}
        trained, _, _ = one.train(sent, {})
        moved = np.concatenate([a.ravel() for a in trained.values()])
        assert np.linalg.norm(moved) == pytest.approx(length, rel=1e-4)
