"""Every shipped experiment names known keys, methods and seeds."""

import itertools

import pytest

from fedapps.config import defaults, experiments, override, read_experiment, variant
from fedapps.server_app import check_run


@pytest.mark.parametrize("name", sorted(experiments()))
def test_a_shipped_experiment_is_valid(name):
    changes, methods, seeds = read_experiment(name)
    config = override(defaults(), changes)
    check_run(config)
    named = [variant(config, method) for method in methods.split(",")]
    assert all(one != other for one, other in itertools.combinations(named, 2))
    assert all(seed.isdigit() for seed in seeds.split(",") if seed)
    assert read_experiment(f"{name}.toml") == (changes, methods, seeds)
