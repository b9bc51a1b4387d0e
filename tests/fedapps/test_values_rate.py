"""The learning rate of runs that learn values: smaller by default, else the user's."""

import numpy as np
import pytest

from fedapps.planning import configured
from fedapps.settings.config import defaults
from fedapps.settings.experiments import Experiment


@pytest.fixture
def table(tmp_path):
    rows = np.arange(60)
    lines = [f"{row % 7},{row * 1.5 + 0.25}" for row in rows]
    (tmp_path / "d.csv").write_text("a,label\n" + "\n".join(lines) + "\n")
    return {"dataset": str(tmp_path / "d.csv"), "partition": "iid", "num-clients": 4}


def test_values_are_learnt_with_a_thirtieth_of_the_rate(table):
    """0.3 / 30 = 0.01, of the common key and of the method's section."""
    config, _ = configured(Experiment(table, methods="fedavg,fedprox"))
    assert config["lr"] == 0.01
    for key in ("fedprox.lr", "fedavg.lr"):
        if key in config:
            assert config[key] == pytest.approx(defaults()[key] / 30)


def test_a_rate_that_the_user_sets_stays(table):
    config, _ = configured(Experiment(table | {"lr": 0.3}, methods="fedavg"))
    assert config["lr"] == 0.3
    config, _ = configured(Experiment(table, methods="fedavg", grid={"lr": [0.1, 0.3]}))
    assert config["lr"] == 0.3


def test_classes_keep_the_rate():
    config, _ = configured(Experiment({"dataset": "digits"}, methods="fedavg"))
    assert config["lr"] == defaults()["lr"]
