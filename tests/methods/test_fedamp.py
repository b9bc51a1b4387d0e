import numpy as np
import pytest
from small_runs import federate, update

from strategies.core.replies import Node
from strategies.methods.fedamp import FedAMP

MODELS = {0: 0.0, 1: 1.0, 4: 3.0}


def cloud(client, **settings):
    models = {c: {"w": np.array([v]), "n": np.array(c)} for c, v in MODELS.items()}
    return FedAMP(**settings).cloud(client, models)


def test_messages_by_hand():
    """σ = 2, α = 1, models 0, 1, 3. Client 0: ξ = e^(−1/2)/2 and e^(−9/2)/2,
    u = 0.303265·1 + 0.005554·3 = 0.319929. The last: e^(−9/2)/2 and e^(−4/2)/2,
    u = 0.067668·1 + (1 − 0.073222)·3 = 2.848001. Counters stay the client's."""
    settings = {"step": 1.0, "width": 2.0}
    assert cloud(0, **settings)["w"].item() == pytest.approx(0.319929, abs=1e-6)
    assert cloud(4, **settings)["w"].item() == pytest.approx(2.848001, abs=1e-6)
    assert cloud(4, **settings)["n"] == 4


def test_messages_that_outweigh_the_client_are_scaled():
    """α = 10: 3.032653 and 0.055545 sum to 3.088198: u = (3.032653 + 3·0.055545)/3.088198."""
    assert cloud(0, step=10.0, width=2.0)["w"].item() == pytest.approx(1.035972, abs=1e-6)


def test_without_messages_every_client_is_alone():
    """α = 0 and μ = 0: clients train as local ones do; each is scored with its own model."""
    config = {"fedamp.step": 0.0, "fedamp.mu": 0.0, "num-clients": 4, "rounds": 2}
    alone = federate(method="local", **config)[0].evaluate_metrics_clientapp
    ours = federate(method="fedamp", **config)[0].evaluate_metrics_clientapp
    assert ours[2]["train-loss"] == pytest.approx(alone[2]["train-loss"], rel=1e-6)
    assert "novel-accuracy" not in ours[2]


def test_a_message_mixes_all_uploaded_models_sampled_or_not():
    """Client 0 alone is sampled and gets what it gets above; a novel client's model is the initial
    one, which counts for nobody."""
    strategy = FedAMP(step=1.0, width=2.0)
    strategy.nodes = [Node(c, 50 + c) for c in MODELS] + [Node(9, 59, novel=True)]
    arrays = strategy.initialize({"w": np.array([0.5])})
    replies = [update(c, {"w": np.array([v])}) for c, v in MODELS.items()]
    arrays = strategy.aggregate(arrays, replies)
    (sent,) = strategy.broadcast(arrays, [Node(0, 50)]).values()
    assert sent["w"].item() == pytest.approx(0.319929, abs=1e-6)
    scored = strategy.personalize(arrays, strategy.nodes).values()
    assert [model["w"].item() for model in scored] == [0.0, 1.0, 3.0, 0.5]


@pytest.mark.parametrize(("client", "expected"), [(0, 0.303265), (4, 0.411911)])
def test_only_uploaded_models_are_mixed(client, expected):
    """σ = 2, α = 1. Clients 0 and 1 uploaded 0 and 1; 4 and 5 uploaded nothing, the initial model
    is ¼. u_0 = ξ_01 · 1 = e^(−1/2)/2 = 0.303265. Client 4 starts from w_4 = ¼:
    ξ_40 = e^(−1/32)/2 = 0.484617, ξ_41 = e^(−9/32)/2 = 0.377420, and
    u_4 = 0.377420 · 1 + (1 − 0.862037) · ¼ = 0.411911."""
    strategy = FedAMP(step=1.0, width=2.0)
    strategy.nodes = [Node(c, 50 + c) for c in (0, 1, 4, 5)]
    arrays = strategy.initialize({"w": np.array([0.25])})
    replies = [update(c, {"w": np.array([float(c)])}) for c in (0, 1)]
    arrays = strategy.aggregate(arrays, replies)
    (sent,) = strategy.broadcast(arrays, [Node(client, 50 + client)]).values()
    assert sent["w"].item() == pytest.approx(expected, abs=1e-6)


def test_a_former_runs_models_go_before_the_initial_one():
    """A novel client, and one who has trained nothing yet, get what that run began with."""
    strategy = FedAMP()
    start = strategy.initialize({"w": np.array([0.5])})
    saved = {"initial/w": np.array([0.7]), "3/w": np.array([9.0])}
    arrays = strategy.restore(start, saved)
    nodes = [Node(3, 53), Node(4, 54), Node(9, 59, novel=True)]
    models = strategy.personalize(arrays, nodes)
    assert [model["w"].item() for model in models.values()] == [9.0, 0.7, 0.7]
