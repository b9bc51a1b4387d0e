"""SHOT: information maximisation, by hand."""

import math

import pytest
import torch
from head_on_inputs import Plain, X
from small_runs import share

from clients.methods.shot import SHOTClient, pseudo_labels
from clients.models import build_model


@pytest.mark.parametrize(("diversity", "expected"), [(1.0, -0.033822), (0.5, 0.296959)])
def test_information_maximisation_by_hand(diversity, expected):
    """p = (¾, ¼) and (½, ½): H(Y|X) = (0.562335 + 0.693147)/2 = 0.627741; their mean (⅝, ⅜) has
    H(Y) = 0.661563."""
    client = SHOTClient(Plain(), share(X, [0, 1]), diversity=diversity)
    logits = torch.tensor([[math.log(3), 0.0], [1.0, 1.0]])
    assert float(client.objective(logits)) == pytest.approx(expected, abs=1e-5)


def test_shot_moves_everything_but_the_head_and_only_for_the_prediction():
    x = torch.randn(6, 1, 2, 2, generator=torch.manual_seed(0))
    model = build_model("mlp-small", (1, 2, 2), 3, 0)
    client = SHOTClient(model, share(x, [0] * 6), lr=0.5, adapt_steps=3)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    own = client.objective(model.eval()(x).detach())
    logits = client.predict(x)
    assert client.objective(logits) < own
    served = client.personal_model(x).state_dict()
    assert torch.equal(served["head.weight"], before["head.weight"])
    assert not torch.equal(served["layers.0.weight"], before["layers.0.weight"])
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_pseudo_labels_by_hand():
    """Unit features (1, 0), (0.6, 0.8), (0, 1) of lengths 2, 5 and 3, p = (0.9, 0.1), (0.8, 0.2),
    (0.1, 0.9). First centroids: (1.38, 0.74) and (0.22, 1.06), as unit vectors (0.881, 0.473) and
    (0.203, 0.979). Cosines: (0.881, 0.203), (0.907, 0.905), (0.473, 0.979): labels 0, 0, 1. New
    centroids (0.894, 0.447) and (0, 1): cosines of the second input 0.894 and 0.8."""
    z = torch.tensor([[2.0, 0.0], [3.0, 4.0], [0.0, 3.0]])
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9]])
    assert pseudo_labels(z, p).tolist() == [0, 0, 1]


def test_a_class_without_a_pseudo_label_gets_none():
    """The second class has the same first centroid as the first, so ties leave it empty."""
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    assert pseudo_labels(z, p).tolist() == [0, 0]


def test_second_centroids_decide_by_hand():
    """p leaves both first centroids near (0.6, 0.8); the second ones are those of the members, and
    move the input (0.8, 0.6) to the other class."""
    z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.0, 1.0]])
    p = torch.tensor([[0.6, 0.4], [0.2, 0.8], [0.1, 0.9], [0.1, 0.9]])
    labels = pseudo_labels(z, p)
    assert labels.tolist() == [0, 0, 1, 1]


def test_shot_weighs_the_cross_entropy_of_pseudo_labels():
    """p = (¾, ¼) and (½, ½) with the pseudo-labels 0 and 1: CE = (0.287682 + 0.693147)/2."""
    client = SHOTClient(Plain(), share(X, [0, 1]), diversity=0.5, pseudo_weight=0.3)
    client._labels_of_parts = (torch.tensor([0, 1]),)
    logits = torch.tensor([[math.log(3), 0.0], [1.0, 1.0]])
    expected = 0.296959 + 0.3 * 0.490415
    assert float(client.objective(logits)) == pytest.approx(expected, abs=1e-5)


def test_shot_adapts_to_the_pseudo_labels_of_all_parts():
    """Parts of the inputs have the labels of the whole, in their order."""
    x = torch.randn(6, 1, 2, 2, generator=torch.manual_seed(0))
    model = build_model("mlp-small", (1, 2, 2), 3, 0)
    client = SHOTClient(model, share(x, [0] * 6), lr=0.5, adapt_steps=2, pseudo_weight=1.0)
    whole = client.predict(x)
    client.parts = lambda inputs: inputs.split(4)
    client.prepare_steps(x)
    assert [len(labels) for labels in client._labels_of_parts] == [4, 2]
    client.diversity = 0.0  # a mean over the parts alone is the mean over the whole
    split = client.predict(x)
    del client.parts
    torch.testing.assert_close(split, client.predict(x))
    assert not torch.allclose(split, whole)
