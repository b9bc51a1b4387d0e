"""Every shipped experiment has known keys, methods and seeds."""

import itertools

import pytest

from fedapps.results.published import SCORES, Published
from fedapps.serverapp import check_run
from fedapps.settings.config import defaults, override
from fedapps.settings.experiments import experiments, read_experiment
from fedapps.settings.variants import Variant, check_shadowed, combinations
from fedapps.tuning import read_search


@pytest.mark.parametrize("name", sorted(experiments()))
def test_a_shipped_experiment_is_valid(name):
    asked = read_experiment(name)
    config = override(defaults(), asked.settings)
    check_run(config)
    labels = combinations(asked.methods.split(","), asked.grid)
    named = [Variant.parse(label).apply(config) for label in labels]
    check_shadowed(config, asked.settings, asked.methods.split(","), asked.from_file)
    assert all(one != other for one, other in itertools.combinations(named, 2))
    assert all(seed.isdigit() for seed in asked.seeds.split(",") if seed)
    for spelled in (f"{name}.toml", f"experiments/{name}", f"experiments/{name}.toml"):
        assert read_experiment(spelled) == asked
    assert asked.methods  # else it would change the main job
    if asked.published:
        for column in Published.read(asked.settings, asked.published).columns:
            assert column.keys() & SCORES.keys()
            for score in column.keys() & SCORES.keys():
                assert all(Variant.parse(label).apply(config) for label in column[score])
    if asked.search:
        read_search(asked.search, config)
