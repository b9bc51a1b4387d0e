"""SHOT: information maximisation, by hand."""

import math

import pytest
import torch
from head_on_inputs import Plain, X
from small_runs import share

from clients.methods.shot import SHOTClient
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
