"""Whether a later client's inputs look like training, on nodes that keep their rows, and in a
run's serving and updates."""

import json
import logging

import numpy as np
import pandas as pd
import pytest
from component_runs import run_components
from torch import nn

import fedapps
import partitions
from fedapps import serverapp
from fedapps.clientapp import app
from fedapps.common import once
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run_in_process
from fedapps.service.finished_run import restore_strategy
from fedapps.service.serving import serve_once
from fedapps.settings.config import defaults
from partitions.datasets.distance import threshold, warning
from partitions.datasets.shared_encoding import Sent, SharedEncoding, learnt
from partitions.datasets.statistics import Statistics, number_sums
from partitions.datasets.statistics_reading import read_encoding
from partitions.inspect import export

ASK = {"standardize": "training-clients"}


def linear(inputs):
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, 2))


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(once, "_said", set())


def said(words):
    return [text for text in once._said if words in text]


def of_values(*values):
    return Statistics("vector", len(values), (number_sums("0", np.array(values)),))


def test_the_largest_distance_is_that_of_a_clients_mean():
    """1, 3 and 6, 6 have mean 4 and deviation √(18/4); the clients' means 2 and 6 are 2 away."""
    encoding = learnt([Sent("a", of_values(1.0, 3.0)), Sent("b", of_values(6.0, 6.0))], "", [])
    assert encoding.largest == pytest.approx(2 / np.sqrt(4.5))
    assert read_encoding(encoding.text()) == encoding
    old = json.loads(encoding.text())
    del old["largest"]
    assert read_encoding(json.dumps(old)).largest == 0


def test_the_limit_and_its_words():
    """Of 16 rows a mean may be off by 4 / √16 = 1 more than the largest, 0.5."""
    limit = threshold(0.5, 16)
    assert limit == 1.5
    assert warning({"age": 1.4, "dose": -1.4}, limit) == ""
    words = warning({"age": 2.0, "dose": -40.25, "pulse": 0.0}, limit)
    assert words == (
        "inputs do not look like training: dose: 40.2 deviations below training; age: 2 deviations "
        "above training (training clients' own are below 1.5)"
    )


def test_the_names_are_those_of_the_scaled_columns():
    signal = SharedEncoding("signal", (0.0, 0.0), (1.0, 1.0))
    assert signal.numbers() == {0: "channel 0", 1: "channel 1"}
    assert SharedEncoding("image", (0.0,), (1.0,)).numbers() == {0: "pixels"}
    ages = number_sums("age", np.array([1.0, np.nan, 3.0]))
    doses = number_sums("dose", np.array([1.0, 2.0, 4.0]))
    table = learnt([Sent("a", Statistics("table", 3, (ages, doses)))], "mean", [])
    assert table.table.outputs == ("age", "age is missing", "dose")
    assert table.numbers() == {0: "age", 2: "dose"}


def rows(ages, doses):
    return pd.DataFrame({"age": ages, "dose": doses})


TRAINING = rows([20.0, 30, 60, 70] * 3, [1.0, 3, 2, 4] * 3).assign(label=[0, 0, 1, 1] * 3)


def run(later, **both):
    def data(number):
        return later if number == 2 else (TRAINING, TRAINING)

    return run_components("fedavg", linear(2), data, (2,), count=3, **both)


def test_a_node_says_that_its_unit_differs():
    """Ages in months; the doses, and their names' order, are as in training."""
    run(rows([240.0, 360, 720], [1.0, 3, 2])[["dose", "age"]], **ASK)
    (text,) = said("do not look like training")
    assert text.startswith("inputs do not look like training: age: ")
    assert "dose" not in text and text.endswith("compare units and columns with training's")
    assert not said("inputs look like training;")


def test_a_node_says_that_its_inputs_look_like_training():
    run(rows([20.0, 30, 70], [1.0, 3, 2]), **ASK)
    (text,) = said("inputs look like training;")
    assert "; the farthest is " in text and not said("do not look like training")


def test_without_statistics_a_node_says_that_they_are_not_kept():
    run(rows([20.0, 30, 70], [1.0, 3, 2]))
    (text,) = said("inputs look like training is not known")
    assert "standardize='training-clients' in both components" in text
    assert not said("do not look")


def test_images_are_judged_by_all_pixels():
    x = np.random.default_rng(0).random((12, 1, 4, 4)).astype(np.float32)
    y = np.arange(12) % 2

    def data(number):
        return 100 * x if number == 2 else ((x, y), (x, y))

    run_components("fedavg", linear(16), data, (1, 4, 4), count=3, **ASK)
    (text,) = said("do not look like training")
    assert "pixels: " in text


def test_serving_and_updates_report_the_distance(tmp_path):
    """A node that `fedapps serve` serves, and its model's next update."""
    frame = pd.concat([TRAINING] * 4, ignore_index=True)
    frame.to_csv(tmp_path / "d.csv", index=False)
    run_in_process(
        defaults()
        | {"dataset": str(tmp_path / "d.csv"), "partition": "iid", "num-clients": 3,
           "train-fraction": 0.67, "rounds": 1, "local-steps": 1, "method": "prior-em",
           "model": "softmax", "output-dir": str(tmp_path / "run")}
    )  # fmt: skip
    finished = fedapps.load(tmp_path / "run")
    later = frame.drop(columns="label").assign(age=12 * frame.age)
    later.to_csv(tmp_path / "later.csv", index=False)
    place = {"partition-id": 0, "data-path": str(tmp_path / "later.csv")}
    config = finished.config | {"serving": finished.card.line()}
    state = tmp_path / "state"
    grid = InProcessGrid(app, config, [place | {"state-dir": str(state)}])
    assert serve_once(restore_strategy(finished, grid), finished)
    report = json.loads((state / "report.json").read_text())
    assert report["inputs"]["warning"].startswith("inputs do not look like training: age: ")
    model = fedapps.load_personal(state)
    model.update(frame.drop(columns="label"))
    assert "warning" not in model.report["inputs"]
    model.update(later)
    assert "age: " in model.report["inputs"]["warning"]


@pytest.mark.parametrize("standardize", ["training-clients", "none"])
def test_exports_with_another_scaling_are_named(standardize, tmp_path, caplog, monkeypatch):
    """Node 2 has exported its months by itself: its deviations are others than those of years."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    folders = []
    for name, factor in (("years", 1), ("months", 12)):
        ages = 7 * np.arange(60.0) % 31
        frame = rows(factor * ages, ages % 7).assign(label=ages > 15)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        config = defaults() | {"dataset": str(tmp_path / f"{name}.csv"), "label": "label",
            "partition": "iid", "num-clients": 3, "train-fraction": 1.0, "model": "softmax",
            "standardize": standardize, "rounds": 1, "local-steps": 1, "method": "fedavg",
            "output-dir": str(tmp_path / "run")}  # fmt: skip
        folders.append(export(partitions.federation(config), tmp_path / name))
    paths = [*folders[0][:2], folders[1][2]]
    places = [{"partition-id": i, "data-path": str(path)} for i, path in enumerate(paths)]
    serverapp.run(InProcessGrid(app, config, places), config, "deployment")
    text = "node 3: its data were exported with another scaling of inputs or values than those of"
    assert caplog.text.count(text) == (standardize != "none")
    assert "dropped" not in caplog.text
