"""Two phases: what only the first phase sends is sent again to clients that may lack it."""

import shutil

import numpy as np
import pytest
from small_runs import federate, share, update

from clients.methods.atp import RATES
from clients.methods.lgfedavg import OWN_BODIES, LGFedAvgClient
from clients.models import build_model
from strategies.core.replies import Node
from strategies.core.round_state import Round
from strategies.methods.atp import ATP
from strategies.methods.lgfedavg import LGFedAvg

NODES = [Node(0, 50), Node(1, 51)]


@pytest.mark.parametrize(("strategy", "part"), [(ATP, RATES), (LGFedAvg, "head.weight")])
def test_a_client_that_does_not_reply_gets_everything_again(strategy, part):
    """Both clients have the network; client 1 misses round 4."""
    server = strategy(fedavg_rounds=2)
    server.now = Round(3)
    server.arrays = arrays = {"w": np.ones(2, np.float32), part: np.zeros(3, np.float32)}
    assert all(sent.keys() == arrays.keys() for sent in server.broadcast(arrays, NODES).values())
    reply = {part: np.ones(3, np.float32)}
    server.aggregate(arrays, [update(0, reply), update(1, reply)])
    server.now = Round(4)
    assert all(sent.keys() == {part} for sent in server.broadcast(arrays, NODES).values())
    server.aggregate(arrays, [update(0, reply)])
    sent = server.broadcast(arrays, NODES)
    assert [sent[node].keys() for node in NODES] == [{part}, arrays.keys()]


@pytest.mark.parametrize(
    ("given", "num_rounds", "first"),
    [
        ({}, 60, 48),
        ({"fedavg_share": 0.4}, 8, 3),
        ({"fedavg_rounds": 7}, 8, 7),
        ({"fedavg_share": 0.0}, 8, 0),
        ({"fedavg_share": 0.4}, 2, 1),
    ],
)
def test_the_first_phase_is_a_share_of_the_rounds(given, num_rounds, first):
    """Rounded down, at least one; a number of rounds comes first."""
    server = ATP(**given)
    server.num_rounds = num_rounds
    phases = []
    for number in (max(first, 1), first + 1):
        server.now = Round(number)
        phases.append(server.in_second)
    assert phases == [first == 0, True]


def test_a_resumed_run_from_a_fedavg_model_stays_in_the_second_phase():
    """Even if no client has the network, as after a round that was undone."""
    rates = {RATES: np.zeros(3, np.float32)}
    first = ATP()
    first.arrays = {"w": np.ones(2, np.float32)} | rates
    first.load_state({"arrays": {"w": np.ones(2, np.float32)}})
    first.now = Round(1)
    again = ATP()
    again.arrays = first.arrays
    again.load_state(first.state())
    again.now = Round(2)
    assert not first.started and again.in_second


def test_atp_goes_on_without_its_clients_states(tmp_path):
    """Those of real nodes stay there; other nodes may take part in the next run."""
    common = {"method": "atp", "atp.fedavg-rounds": 1}
    federate(**common, rounds=2, **{"output-dir": str(tmp_path)})
    shutil.rmtree(tmp_path / "clients")
    result, _ = federate(**common, rounds=1, **{"from-dir": str(tmp_path)})
    assert result.train_metrics_clientapp[1]["valid-replies"] == 3


def test_lg_fedavgs_client_keeps_its_body_and_trains_no_other():
    """A body that is sent again does not replace its own; with neither it refuses."""
    model = build_model("mlp-small", (1, 2, 2), 3, 0)
    rng = np.random.default_rng(0)
    client = LGFedAvgClient(model, share(rng.random((6, 1, 2, 2), np.float32), np.arange(6) % 3))
    sent = {name: rng.random(a.shape, np.float32) for name, a in client.initial.items()}
    head = {name: a for name, a in sent.items() if name.startswith("head.")}
    with pytest.raises(ValueError, match="the body, which the server sent once"):
        client.train(head, {OWN_BODIES: True})
    client.train(sent, {OWN_BODIES: True})
    state = dict(client.state)
    with_body = client.train(sent, {OWN_BODIES: True})[0]
    client.state = state
    without = client.train(head, {OWN_BODIES: True})[0]
    assert all(np.array_equal(with_body[name], without[name]) for name in head)
    assert not np.array_equal(sent["layers.0.weight"], state["personal/layers.0.weight"])
