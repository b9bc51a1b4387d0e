"""A number that overflowed leaves its mean, and the report, the metrics and the log say so."""

import logging
import math

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.core.arrays import to_record
from fedapps.engines.in_process_grid import InProcessGrid
from strategies.core.evaluation import Evaluation
from strategies.core.replies import Node, Update
from strategies.core.reply_checks import not_finite
from strategies.methods.fedavg import FedAvg

START = {"w": np.zeros(2, np.float32)}
LOSSES = {1: math.nan, 2: 0.5, 3: math.inf}


def clients(losses):
    """Three foreign clients; two have diverged."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        numbers = MetricRecord({"num-examples": 1, "loss": losses[context.node_id]})
        return Message(
            RecordDict({"arrays": message.content["arrays"], "metrics": numbers}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message, context):
        numbers = MetricRecord({"num-examples": 1, "eval_loss": losses[context.node_id]})
        return Message(RecordDict({"metrics": numbers}), reply_to=message)

    return InProcessGrid.simulation(app, {}, 3)


def test_it_is_counted_and_logged_once(caplog):
    reports = []
    strategy = FedAvg(evaluate_every=1, on_round=reports.append)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = strategy.start(clients(LOSSES), to_record(START), num_rounds=2)
    for round_ in (1, 2):
        train = result.train_metrics_clientapp[round_]
        assert (train["loss"], train["not-finite-loss"]) == (0.5, 2)
        scores = result.evaluate_metrics_clientapp[round_]
        assert (scores["eval_loss"], scores["train-not-finite-eval_loss"]) == (0.5, 2)
    assert [report["not-finite"] for report in reports] == [{"loss": 2}] * 2
    said = "round 1: loss of 2 of 3 clients is NaN, infinite or beyond 1e12, and is left out"
    assert caplog.text.count(said) == 1
    assert caplog.text.count("eval_loss of 2 of 3 clients") == 1
    assert caplog.text.count("left out of the mean; training has diverged there: lower lr") == 2


def test_the_log_does_not_blame_training_for_a_score_without_a_value(caplog):
    """AUROC of a client whose samples have one class."""
    replies = [update({"accuracy": 0.5, "auroc": 0.75}), update({"accuracy": 0.5}, ("auroc",))]
    with caplog.at_level(logging.WARNING, "flwr"):
        numbers = Evaluation(FedAvg()).metrics(replies)
    assert (numbers["train-auroc"], numbers["train-not-finite-auroc"]) == (0.75, 1)
    assert "auroc of 1 of 2 clients is NaN" in caplog.text
    assert "it is not defined for their samples, or training has diverged" in caplog.text


def update(metrics, without_number=()):
    """The valid evaluation reply of a training client."""
    return Update(Node(0, 0), {}, 4, metrics, not_finite=without_number)


def test_a_run_without_such_numbers_says_nothing(caplog):
    grid = clients(dict.fromkeys(LOSSES, 0.5))
    with caplog.at_level(logging.WARNING, "flwr"):
        result = FedAvg().start(grid, to_record(START), num_rounds=1)
    assert not any("not-finite" in name for name in result.train_metrics_clientapp[1])
    assert "left out" not in caplog.text


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"loss": math.nan, "accuracy": 0.5}, ("loss",)),
        ({"a": [1.0, math.inf], "b": [1, 2]}, ("a",)),
        ({"a": 2e12, "text": "nan", "big": 10**20}, ("a",)),
        ({"\n": math.nan}, ()),
    ],
)
def test_which_numbers_are_left_out(values, names):
    assert not_finite(values) == names


def test_clients_without_validation_samples_are_said(caplog):
    """`evaluate_metrics_clientapp` was {5: {}, 10: {}} without a word."""
    import torch

    import fedapps

    app = fedapps.client_app(
        "fedavg",
        model=lambda: torch.nn.Linear(2, 2),
        data=lambda context: (torch.randn(8, 2), torch.arange(8) % 2),
    )
    arrays = {n: t.numpy() for n, t in torch.nn.Linear(2, 2).state_dict().items()}
    strategy = FedAvg(evaluate_every=1)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = strategy.start(InProcessGrid.simulation(app, {}, 2), to_record(arrays), 2)
    assert [dict(metrics) for metrics in result.evaluate_metrics_clientapp.values()] == [{}, {}]
    assert caplog.text.count("2 clients were evaluated, and none has samples to be scored on") == 1
