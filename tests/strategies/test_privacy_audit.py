"""An audit (Jagielski et al., NeurIPS 2020): what is released with and without one user must not
be distinguished better than ε allows.

For any set S of outcomes (ε, δ)-privacy says P(S) ≤ e^ε P'(S) + δ. So where a user is present p of
the outcomes fall into S, and p' where it is absent, ε ≥ ln((p − δ) / p'). A lower bound of this
holds with the confidence that p and p' do (Clopper and Pearson). A large δ needs few runs. All
draws are seeded."""

import logging
import math

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from scipy.stats import beta

from clients.core.arrays import from_record, to_record
from experiments.audit.view import seeded_entropy
from fedapps.engines.in_process_grid import InProcessGrid
from strategies.core.privacy import Privacy, noised
from strategies.methods.fedavg import FedAvg

DELTA, DOUBT = 0.1, 1e-4
SETTINGS = {"dp": "central", "dp_noise_multiplier": 1.0, "dp_clip": 0.5, "dp_delta": DELTA}
START = {"w": np.array([2.0, -1.0], np.float32)}
app = ClientApp()


@app.train()
def train(message, context):
    """A stranger's client, which clips nothing: user 2 moves the first entry by far, the others
    the second."""
    arrays = from_record(message.content["arrays"])
    moved = arrays["w"] + ([70.0, 0.0] if context.node_id == 2 else [0.0, 0.3])
    content = {"arrays": to_record({"w": moved.astype(np.float32)})}
    content["metrics"] = MetricRecord({"num-examples": 5, "loss": 0.1})
    return Message(RecordDict(content), reply_to=message)


def fresh():
    """Privacy before anything is spent."""
    return Privacy(fraction_train=0.5, num_clients=4, train_fraction=1.0, **SETTINGS)


def moves(users, runs):
    """The first entry's move in each of `runs` rounds, which know nothing of each other but where
    they start, in units of C / (q N)."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    grid = InProcessGrid.simulation(app, {}, 3)
    grid.get_node_ids = lambda: users
    strategy, at = FedAvg(privacy=fresh(), min_available_nodes=len(users)), []

    def note(number, arrays):
        at.append(from_record(arrays)["w"][0])
        strategy.privacy = fresh()  # no ε of all rounds together is asked for

    strategy.start(grid, to_record(START), runs, evaluate_fn=note)
    return np.diff(np.array(at, np.float64)) * 2 / 0.5


def lower_bound(runs, limit):
    """ε that so many runs with, and so many without user 2 prove: S are moves over `limit`."""
    with seeded_entropy(0):
        seen, unseen = (int((moves(users, runs) > limit).sum()) for users in ([1, 2, 3], [1, 3]))
    p = beta.ppf(DOUBT, seen, runs - seen + 1)
    p_absent = beta.ppf(1 - DOUBT, unseen + 1, runs - unseen)
    return math.log(max(p - DELTA, 1e-9) / p_absent)


def claimed():
    """ε(δ) that a run of one round reports."""
    privacy = fresh()
    privacy.spend([])
    return privacy.report()["dp-epsilon"]


def test_the_claim_survives_1000_runs():
    """Over 0.75 C, p = 0.5 Φ(0.25) + 0.5 Φ(−0.75) = 0.4127 and p' = 0.2266 prove 0.322 at most."""
    assert 0.32 < claimed() < 0.4
    assert lower_bound(500, 0.75) < claimed()


def test_half_the_noise_does_not(monkeypatch):
    """p = 0.5 Φ(0.5) + 0.5 Φ(−1.5) = 0.379 and p' = 0.0668 prove up to 1.4, and 700 runs with
    these draws 0.77."""
    monkeypatch.setattr("strategies.core.privacy.noised", lambda a, s, by: noised(a, s / 2, by))
    assert lower_bound(700, 0.75) > claimed()


def test_a_server_that_does_not_clip_does_not(monkeypatch):
    """70 = 140 C lies far over 4 C, noise hardly ever: p = 0.5, p' = 3e-5."""
    monkeypatch.setattr("strategies.core.privacy.clipped", lambda change, norm: change)
    assert lower_bound(100, 4.0) > claimed()
