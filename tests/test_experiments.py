"""Every shipped experiment has known keys, methods and seeds."""

import itertools

import pytest

from fedapps.results.published import SCORES, Published
from fedapps.serverapp import check_run
from fedapps.settings.config import (
    combinations,
    defaults,
    experiments,
    override,
    read_experiment,
    variant,
)
from fedapps.tuning import read_search


@pytest.mark.parametrize("name", sorted(experiments()))
def test_a_shipped_experiment_is_valid(name):
    asked = read_experiment(name)
    config = override(defaults(), asked.settings)
    check_run(config)
    labels = combinations(asked.methods.split(","), asked.grid)
    named = [variant(config, label) for label in labels]
    assert all(one != other for one, other in itertools.combinations(named, 2))
    assert all(seed.isdigit() for seed in asked.seeds.split(",") if seed)
    assert read_experiment(f"{name}.toml") == asked
    if asked.published:
        for column in Published.read(asked.settings, asked.published).columns:
            assert column.keys() & SCORES.keys()
            for score in column.keys() & SCORES.keys():
                assert all(variant(config, label) for label in column[score])
    if asked.search:
        read_search(asked.search, config)
