"""Our matching of one layer beside FedMA's code, which FEDAPPS_AUTHORS_DIR/FedMA holds
(github.com/IBM/FedMA, commit 4b586a5). Its costs are those of a Beta process, ours squared
distances: where neurons are told apart, both match the same ones. Its global neurons are shrunk
to the prior mean. scipy's solver of the assignment stands for lapsolver's.

FEDAPPS_AUTHORS_DIR=… pytest -n0 -m slow tests/test_authors_fedma.py"""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from strategies.maths.matching import match

FOLDER = Path(os.environ.get("FEDAPPS_AUTHORS_DIR", "/nowhere")) / "FedMA"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="FEDAPPS_AUTHORS_DIR names no such folder"),
]
CLIENTS, NEURONS, INPUTS = 4, 6, 8
VARIANCE, PRIOR_VARIANCE, GAMMA = 0.01, 1.0, 1.0


@pytest.fixture
def match_layer(monkeypatch):
    """Their function."""
    monkeypatch.syspath_prepend(str(FOLDER))
    solver = SimpleNamespace(solve_dense=linear_sum_assignment)
    monkeypatch.setitem(sys.modules, "lapsolver", solver)
    yield import_module("matching.pfnm").match_layer
    for name in list(sys.modules):
        if name.split(".")[0] == "matching":
            del sys.modules[name]


@pytest.mark.parametrize("sweeps", [0, 2])
def test_one_layer(match_layer, sweeps):
    """Six neurons in another order at each of four clients; one of the last client is its own."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(NEURONS, INPUTS))
    clients = []
    for _ in range(CLIENTS):
        order = generator.permutation(NEURONS)
        clients.append(centres[order] + 0.01 * generator.normal(size=(NEURONS, INPUTS)))
    clients[-1][0] = 3 * generator.normal(size=INPUTS)
    np.random.seed(0)  # theirs draws the order of its sweeps
    theirs, sums, precisions = match_layer(
        clients,
        [np.full(INPUTS, 1 / VARIANCE)] * CLIENTS,
        np.zeros(INPUTS),
        np.full(INPUTS, 1 / PRIOR_VARIANCE),
        GAMMA,
        sweeps,
    )
    ours = match(
        clients, [1.0] * CLIENTS, new_neuron_cost=0.5, max_width=2 * NEURONS, sweeps=sweeps
    )
    assert len(ours.neurons) == len(sums) == NEURONS + 1
    renamed = {}  # their global neurons by ours
    for mine, its in zip(ours.assignments, theirs, strict=True):
        for i, j in zip(mine.tolist(), its, strict=True):
            assert renamed.setdefault(i, j) == j
    assert len(set(renamed.values())) == NEURONS + 1
    for i, j in renamed.items():
        shrunk = ours.neurons[i] * ours.support[i] / (ours.support[i] + VARIANCE / PRIOR_VARIANCE)
        np.testing.assert_allclose(sums[j] / precisions[j], shrunk, rtol=1e-10, atol=1e-12)
