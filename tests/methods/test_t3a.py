"""T3A: templates and their support, by hand."""

import math

import numpy as np
import pytest
import torch
from head_on_inputs import Plain, X
from small_runs import share
from torch import nn

from clients.methods.t3a import T3AClient
from clients.models import build_model


def t3a(model=None, **settings):
    """A client that has predicted X."""
    client = T3AClient(model or Plain(), share(X, [0, 1]), **settings)
    client.predict(X)
    return client


@pytest.mark.parametrize("unit", [True, False])
def test_templates_by_hand(unit):
    """a = (3, 4) is of class 0 by logits (6, 4), b = (1, 5) of class 1 by (2, 5). The means are
    m_0 = ((1, 0) + (0.6, 0.8))/2 = (0.8, 0.4) and m_1 = ((0, 1) + b/√26)/2 = (0.098058, 0.990290),
    of lengths 0.894427 and 0.995133. As printed, a · m_0 = 4 < a · m_1 = 4.255335 moves a to
    class 1. Of unit length, a · c_0 = 4.472136 > a · c_1 = 4.276148 leaves it in class 0."""
    assert Plain()(X).argmax(1).tolist() == [0, 1]
    client = t3a(supports=0, unit_templates=unit)
    means, lengths = np.array([[0.8, 0.4], [0.098058, 0.990290]]), np.array([0.894427, 0.995133])
    expected = means / lengths[:, None] if unit else means
    assert client.templates().numpy() == pytest.approx(expected, abs=1e-5)
    logits = client.predict(X)
    assert logits[0].tolist() == pytest.approx([4.472136, 4.276148] if unit else [4, 4.255335])
    assert logits.argmax(1).tolist() == ([0, 1] if unit else [1, 1])


def test_templates_are_means_by_default():
    assert t3a(supports=0).templates()[0].tolist() == pytest.approx([0.8, 0.4])


def test_a_bias_counts_in_the_pseudo_labels():
    """With (0, 3) both inputs, of logits (6, 7) and (2, 8), are of class 1: the means are (1, 0)
    and ((0, 1) + (0.6, 0.8) + (1, 5)/√26)/3."""
    model, root = Plain(), math.sqrt(26)
    model.head.bias = nn.Parameter(torch.tensor([0.0, 3.0]))
    templates = t3a(model, supports=0, unit_templates=False).templates()
    expected = np.array([[1, 0], [(0.6 + 1 / root) / 3, (1.8 + 5 / root) / 3]])
    assert templates.numpy() == pytest.approx(expected)


def test_one_support_is_the_one_of_least_entropy():
    """Class 0: ω_0 with logits (4, 0) is surer than a with (6, 4). Class 1: b with (2, 5) is
    surer than ω_1 with (0, 1)."""
    templates = t3a(supports=1).templates()
    torch.testing.assert_close(templates, torch.stack([torch.tensor([1.0, 0.0]), X[1] / 26**0.5]))


def test_the_served_network_predicts_as_the_client_did():
    client = T3AClient(
        build_model("mlp-small", (1, 2, 2), 3, 0), share(torch.ones(1, 1, 2, 2), [0])
    )
    x = torch.randn(5, 1, 2, 2, generator=torch.manual_seed(0))
    before = {n: t.clone() for n, t in client.model.state_dict().items()}
    assert torch.equal(client.predict(x), client.personal_model(x)(x))
    assert all(torch.equal(t, before[n]) for n, t in client.model.state_dict().items())
