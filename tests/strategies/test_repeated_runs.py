"""A second run of a strategy begins as the first did."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from small_runs import FEW, NEEDS, SMALL, bits

from clients.core.arrays import to_record
from fedapps.building import strategy_of_run
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.settings.config import override
from strategies.methods.fedavg import FedAvg
from strategies.methods.pfedhn import PFedHN

# A name for each of the strategies' classes: what they keep differs.
LESS = {"num-clients": 4, "model": "mlp-small", "batch-size": 16, "evaluate-every": 2} | FEW
BY_STRATEGY = {method.strategy: name for name, method in METHODS.items()}


@pytest.mark.parametrize("method", sorted(BY_STRATEGY.values()))
def test_a_second_start_gives_what_the_first_gave(method):
    """New nodes, the same record: weights and all scores agree to the last bit."""
    config = override(SMALL, {"method": method} | LESS | NEEDS.get(method, {}))
    strategy, shared = strategy_of_run(config)
    record = to_record(shared)
    results = []
    for _ in range(2):
        grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
        results.append(strategy.start(grid, record, num_rounds=2, timeout=60))
    first, second = results
    assert bits(first) == bits(second)
    assert first.evaluate_metrics_clientapp == second.evaluate_metrics_clientapp


class Counting(FedAvg):
    """An own method that keeps a number of its own, and names it nowhere."""

    def __init__(self, begin=5, **options):
        super().__init__(**options)
        self.count = begin
        self.seen = []

    def aggregate(self, arrays, updates):
        self.count += 1
        self.seen.append(len(updates))
        return super().aggregate(arrays, updates)


def run_once(strategy, rounds=2):
    config = override(SMALL, {"method": "fedavg"})
    grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
    _, shared = strategy_of_run(config)
    return strategy.start(grid, to_record(shared), num_rounds=rounds, timeout=60)


def test_attributes_of_an_own_strategy_begin_anew():
    strategy = Counting(begin=7)
    for _ in range(2):
        run_once(strategy)
        assert strategy.count == 9 and len(strategy.seen) == 2


def test_what_a_user_assigns_between_runs_stays():
    """Before the first run, and between two."""
    heard = []
    strategy = Counting()
    strategy.on_round = heard.append
    run_once(strategy)
    strategy.evaluate_every = 1
    run_once(strategy)
    run_once(strategy)
    assert len(heard) == 6 and strategy.evaluate_every == 1 and strategy.count == 7


def test_a_run_that_failed_leaves_nothing_to_the_next():
    strategy = Counting()
    record = ArrayRecord({"x": Array(np.zeros(1))})
    with pytest.raises(Exception, match=r".+"):
        strategy.start(None, record, num_rounds=1)
    run_once(strategy)
    assert strategy.count == 7


def test_generated_models_begin_anew():
    """PFedHN's embeddings and hypernetwork, whatever a caller does to torch's generator."""
    config = override(SMALL, {"method": "pfedhn"})
    strategy, shared = strategy_of_run(config)
    assert isinstance(strategy, PFedHN)
    found = []
    for _ in range(2):
        torch.manual_seed(len(found))
        grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
        strategy.start(grid, to_record(shared), num_rounds=1, timeout=60)
        found.append({name: array.copy() for name, array in strategy.arrays.items()})
    for name, array in found[0].items():
        assert np.array_equal(array, found[1][name]), name
