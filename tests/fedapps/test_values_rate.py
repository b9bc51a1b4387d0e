"""The learning rate of runs that learn values: smaller by default, else the user's."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge

import partitions
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.planning import configured
from fedapps.run_settings import with_run_config
from fedapps.serverapp import run
from fedapps.settings.config import completed, defaults, resolve, settings
from fedapps.settings.experiments import Experiment, read_arguments
from fedapps.settings.rates import LARGEST_RATE_OF_VALUES


@pytest.fixture
def table(tmp_path):
    rows = np.arange(60)
    lines = [f"{row % 7},{row * 1.5 + 0.25}" for row in rows]
    (tmp_path / "d.csv").write_text("a,label\n" + "\n".join(lines) + "\n")
    return {"dataset": str(tmp_path / "d.csv"), "partition": "iid", "num-clients": 4}


def test_values_are_learnt_with_a_smaller_rate(table):
    """Of all methods; a rate that is smaller already, as pFedHN's 0.005, stays."""
    config, _ = configured(Experiment(table, methods="fedavg,fedprox"))
    for method in ("fedavg", "fedprox", "fedtta"):
        assert settings(config, method)["lr"] == LARGEST_RATE_OF_VALUES == 0.03
    assert settings(config, "pfedhn")["lr"] == settings(defaults(), "pfedhn")["lr"] == 0.005


def test_a_rate_that_the_user_sets_stays(table):
    config, _ = configured(Experiment(table | {"lr": 0.3}, methods="fedavg"))
    assert config["lr"] == 0.3
    assert completed(config, trusted=True)["lr"] == 0.3  # on the client, too
    config, _ = configured(Experiment(table, methods="fedavg", grid={"lr": [0.1, 0.3]}))
    assert config["lr"] == 0.3
    config, _ = configured(Experiment(table | {"fedtta.lr": 0.2}, methods="fedavg,fedtta"))
    assert (config["lr"], config["fedtta.lr"]) == (0.03, 0.2)


def test_flwr_run_has_the_same_rate(table):
    """Flower's configuration lacks keys of ours, and its `lr` of 0.3 was not said."""
    flower = {key: value for key, value in defaults().items() if "fedtta++" not in key} | table
    assert resolve(flower, reads_data=True)["lr"] == 0.03
    assert completed(flower, trusted=True)["lr"] == 0.03
    assert resolve(flower)["lr"] == 0.3  # a real node does not read what the server names
    assert resolve(flower | {"task": "values"})["lr"] == 0.03
    assert resolve(flower | {"lr": 0.2}, reads_data=True)["lr"] == 0.2


def test_components_have_the_same_rate():
    """The task is a keyword, or in the run's configuration."""
    values = defaults() | {"task": "values"}
    config, _ = with_run_config("client_app", "fedavg", values, {}, {})
    assert config["lr"] == 0.03
    config, _ = with_run_config("client_app", "fedavg", defaults(), {}, {"task": "values"})
    assert config["lr"] == 0.03
    config, _ = with_run_config("client_app", "fedavg", values, {"lr": 0.3}, {})
    assert config["lr"] == 0.3


def test_classes_keep_the_rate():
    config, _ = configured(Experiment({"dataset": "digits"}, methods="fedavg"))
    assert config["lr"] == defaults()["lr"]


def test_diabetes_is_learnt_as_by_ridge_on_the_pooled_rows(tmp_path):
    """R² for novel clients within 0.03 of scikit-learn's ridge on the training clients' training
    rows, with the default settings and 20 rounds."""
    load_diabetes(as_frame=True, scaled=False).frame.to_csv(tmp_path / "d.csv", index=False)
    arguments = [f"dataset={tmp_path / 'd.csv'}", "label=target", "task=values", "partition=iid"]
    config, _ = configured(read_arguments([*arguments, "num-clients=4", "rounds=20"]))
    federation = partitions.federation(config)
    rows = {True: [], False: []}
    for client, is_novel in enumerate(federation.novel):
        share = federation.share(client)
        samples = share.everything if is_novel else share.train
        rows[bool(is_novel)].append(samples[:])
    (x, y), (x_novel, y_novel) = (map(torch.cat, zip(*rows[k], strict=True)) for k in (False, True))
    ridge = Ridge().fit(x, y[:, 0])
    grid = InProcessGrid.simulation(app, config, 4)
    scores = run(grid, config).evaluate_metrics_clientapp
    best = min(scores, key=lambda number: scores[number]["train-trimmed-rmse"])
    assert (len(x), len(x_novel)) == (188, 222)
    assert scores[best]["novel-r2"] > ridge.score(x_novel, y_novel) - 0.03
