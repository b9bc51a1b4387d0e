"""TENT: which parameters move, which way the entropy goes, and what stays as it was."""

import numpy as np
import pytest
import torch
from torch import nn

from clients.arrays import model_arrays
from clients.tent import TENTClient, entropy
from partitions.shares import Samples, Share


def test_entropy_by_hand():
    """σ(0, 0) has entropy ln 2; σ(ln 3, 0) = (¾, ¼) has 2 ln 2 − ¾ ln 3."""
    logits = torch.tensor([[0.0, 0.0], [np.log(3.0), 0.0]])
    expected = (np.log(2) + 2 * np.log(2) - 0.75 * np.log(3)) / 2
    assert float(entropy(logits)) == pytest.approx(expected)


def client(model, **options):
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    data = Samples(x, (x[:, 0] > 0).long(), torch.arange(40), scale=1.0)
    return TENTClient(model, Share(data, data, None, data, True), lr=0.5, **options)


def networks():
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    normed = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return plain, normed


def test_only_normalisation_moves_where_there_is_one():
    plain, normed = networks()
    names = lambda c: {
        n for n, p in c.model.named_parameters() if any(p is q for q in c._adapted())
    }  # noqa: E731, E501
    assert names(client(normed)) == {"1.weight", "1.bias"}
    assert names(client(normed, parameters="all")) == set(dict(normed.named_parameters()))
    assert names(client(plain)) == set(dict(plain.named_parameters()))
    with pytest.raises(ValueError, match="'some'"):
        client(plain, parameters="some")


@pytest.mark.parametrize("index", [0, 1])
def test_adaptation_lowers_entropy_and_leaves_the_model(index):
    model = networks()[index]
    tent = client(model, adapt_steps=5)
    x = tent.share.everything[:][0]
    before = model_arrays(model)
    model.eval()
    with torch.no_grad():
        unadapted = float(entropy(model(x)))
    assert float(entropy(tent.predict(x))) < unadapted
    after = model_arrays(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_no_steps_predict_as_the_model_does():
    model = networks()[0]
    tent = client(model, adapt_steps=0)
    x = tent.share.everything[:][0]
    assert torch.equal(tent.predict(x), model(x).detach())
