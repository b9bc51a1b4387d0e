"""Every shipped experiment has known keys, methods and seeds."""

import itertools
import json

import pytest

from fedapps.results.published import SCORE_COLUMNS, Published
from fedapps.serverapp import check_run, run_in_process
from fedapps.settings.config import defaults, override
from fedapps.settings.experiments import Experiment, experiments, parts, read_experiment
from fedapps.settings.unread import check_read
from fedapps.settings.variants import Variant, combinations
from fedapps.tuning import read_search


@pytest.mark.parametrize("name", sorted(experiments()))
def test_a_shipped_experiment_is_valid(name):
    asked = read_experiment(name)
    if asked.include:
        assert set(asked.include) <= experiments().keys()
        return
    config = override(defaults(), asked.settings)
    check_run(config)
    labels = combinations(asked.methods.split(","), asked.grid, asked.settings)
    named = [Variant.parse(label).apply(config) for label in labels]
    assert not check_read(config, asked.settings, labels, asked.from_file)
    assert all(one != other for one, other in itertools.combinations(named, 2))
    assert all(seed.isdigit() for seed in asked.seeds.split(",") if seed)
    for spelled in (f"{name}.toml", f"experiments/{name}", f"experiments/{name}.toml"):
        assert read_experiment(spelled) == asked
    assert asked.methods  # else it would change the main job
    if asked.published:
        for column in Published.read(asked.settings, asked.published).columns:
            assert column.keys() & SCORE_COLUMNS.keys()
            for score in column.keys() & SCORE_COLUMNS.keys():
                assert all(Variant.parse(label).apply(config) for label in column[score])
    if asked.search:
        read_search(asked.search, config, asked.methods.split(","))


def test_an_experiment_includes_others_and_changes_them(tmp_path):
    """What the whole says wins, also where a part has several values; a part keeps the rest."""
    whole = read_experiment("unseen/digits") | Experiment({"partition.alpha": 0.5}, methods="tent")
    found = {place: part for part, place in parts(whole, tmp_path)}
    assert len(found) == len(whole.include)
    part = found[tmp_path / "dirichlet"]
    assert (part.settings["partition.alpha"], part.grid, part.methods) == (0.5, {}, "tent")
    assert (part.settings["partition"], part.settings["model"]) == ("dirichlet", "convnet-atp")
    assert part.seeds == "0,1,2,3,4"
    places = [place for _, place in parts(read_experiment("unseen/all"), tmp_path)]
    assert len(set(places)) == len(places)
    assert {tmp_path / "digits" / "step", tmp_path / "mnist" / "step"} <= set(places)
    alone = read_experiment("unseen/step")
    assert parts(alone, tmp_path) == [(alone, tmp_path)]


@pytest.mark.parametrize("name", read_experiment("unseen/digits").include)
def test_a_scenario_runs_two_rounds(name, tmp_path):
    whole = read_experiment("unseen/digits")
    asked = read_experiment(name) | Experiment(whole.settings)
    small = {"rounds": 2, "num-clients": 8, "model": "mlp", "evaluate-every": 2, "seed": 0}
    small |= {"output-dir": str(tmp_path), "partition.samples": 400}
    label = combinations(["tent"], asked.grid)[0]
    config = Variant.parse(label).apply(override(defaults(), asked.settings | small))
    run_in_process(config)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"] and summary["evaluation"]["novel-clients"] == 2


def test_a_variant_of_an_evaluation_starts_from_its_methods_run(tmp_path):
    """A test shift changes no training; another learning rate does, and starts from FedAvg."""
    for name in ("fedthe-seed0", "fedavg-seed0"):
        (tmp_path / name).mkdir()
    shifted = Variant.parse("fedthe partition.test-shift=natural")
    assert shifted.former(tmp_path, 0) == "fedthe-seed0"
    assert Variant.parse("fedthe lr=0.1").former(tmp_path, 0) == "fedavg-seed0"
