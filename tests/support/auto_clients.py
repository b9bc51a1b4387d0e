"""Clients of auto, the statistics of one, and rules made by hand."""

import numpy as np
import torch
from small_runs import share, update

from clients.core.decision.choice import Rule, num_features
from clients.methods.auto import AutoClient
from clients.models import build_model
from strategies.core.replies import Node
from strategies.methods.auto import Auto, _Exchanges

X = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


def network(name="convnet-bn"):
    return build_model(name, (1, 8, 8), 3, 0)


def training_client(name="convnet-bn", **settings):
    return AutoClient(network(name), share(X, Y), held_out=0.75, **settings)


def source_of(client, *, idle=0):
    """Statistics of one client's held-out samples, as the server makes them; so many `idle` clients
    answer with zeros."""
    strategy = Auto(alpha=0.5)
    nodes = [Node(i, 50 + i) for i in range(1 + idle)]
    exchanges = _Exchanges(strategy, client.initial, nodes)
    answer = {"moments": client.moments, "spread": client.spread}

    def exchange(action, payloads, like):
        arrays, _ = answer[action.partition(".")[2]](next(iter(payloads.values())), {})
        expected = next(iter(like.values()))
        assert {n: a.shape for n, a in arrays.items()} == {n: a.shape for n, a in expected.items()}
        zeros = {name: np.zeros_like(array) for name, array in arrays.items()}
        return [update(0, arrays), *(update(1 + i, zeros) for i in range(idle))]

    strategy.exchange = exchange
    source, _ = exchanges.statistics()
    return source


def rule_that_chooses(client, place, *, win_rate=0.9):
    """Any misfit is of label shift; the candidate at this place has that win rate, others none."""
    candidates, layers = len(client.names), len(client.blocks.sizes)
    features = num_features(client.has_statistics, client.names) - 1
    calibration = np.zeros((2, candidates, 4))
    if place >= 0:
        calibration[:, place, 0] = win_rate
    return Rule(
        misfit_mean=np.zeros(layers),
        misfit_deviation=np.ones(layers),
        misfit_limit=np.array(1e6),
        ranges=np.tile([-9.0, 9.0], (candidates, 4, 1)),
        feature_mean=np.zeros((candidates, features)),
        feature_deviation=np.ones((candidates, features)),
        coefficients=np.zeros((candidates, 2, features + 1)),
        calibration=calibration,
        guard=np.zeros(2),
    )
