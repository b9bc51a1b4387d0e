"""APFL: a round by hand."""

import math

import numpy as np
import pytest
from linear_clients import logistic, two_weights, values

from clients.methods.apfl import APFLClient


def test_apfl_goes_on_with_its_own_mixing():
    """α = 0.9 of the last round, not the setting's ½; scored: v̄ = 0.9·(3, 1) + 0.1·(1, 2)."""
    client = logistic(APFLClient, 0, learn=False)
    client.state = {
        "own/weight": two_weights(3.0, 1.0)["weight"],
        "mixing": np.array(0.9, np.float32),
    }
    client.receive(two_weights(1.0, 2.0), {})
    assert client.model.weight.flatten().tolist() == pytest.approx([2.8, 1.1])
    _, _, metrics = client.train(two_weights(0.0, 0.0), {})
    assert metrics["mixing"] == pytest.approx(0.9)
    assert client.state["mixing"] == pytest.approx(0.9)


@pytest.mark.parametrize("steps", [1, 2])
def test_apfl_by_hand(steps):
    """w = (0, 0), v = (ln 3, 0), α = ½, label 0, η = 0.2. v̄ = (½ ln 3, 0) has p_0 = √3/(1 + √3),
    so ∇F(v̄) = (−g, g), g = 1 − p_0. v → v + 0.2·½·(g, −g); w → (0.1, −0.1);
    α → ½ + 0.2·g·ln 3, in the first step alone."""
    client = logistic(APFLClient, 0, lr=0.2, local_steps=steps)
    client.state = {"own/weight": two_weights(math.log(3), 0.0)["weight"]}
    client.state["mixing"] = np.array(0.5, np.float32)
    reply, _, metrics = client.train(two_weights(0.0, 0.0), {})
    g = 1 - math.sqrt(3) / (1 + math.sqrt(3))
    alpha = 0.5 + 0.2 * g * math.log(3)
    assert metrics["mixing"] == pytest.approx(alpha)
    if steps == 1:
        assert values(reply) == pytest.approx([0.1, -0.1])
        assert values(client.state, "own/weight") == pytest.approx(
            [math.log(3) + 0.1 * g, -0.1 * g]
        )
    client.state["own/weight"] = two_weights(4.0, 0.0)["weight"]
    client.receive(two_weights(1.0, 2.0), {})
    mixture = [alpha * 4 + (1 - alpha), (1 - alpha) * 2]
    assert client.model.weight.flatten().tolist() == pytest.approx(mixture)


def test_apfl_keeps_its_mixing_within_bounds_or_as_it_is():
    """v is worse than w by far: α falls below 0 and stays at it. Without learning it stays."""
    for learn, expected in ((True, 0.0), (False, 0.9)):
        client = logistic(APFLClient, 0, lr=1.0, local_steps=1, mixing=0.9, learn=learn)
        client.state = {
            "own/weight": two_weights(-9.0, 9.0)["weight"],
            "mixing": np.array(0.9, np.float32),
        }
        assert client.train(two_weights(1.0, 0.0), {})[2]["mixing"] == pytest.approx(expected)
