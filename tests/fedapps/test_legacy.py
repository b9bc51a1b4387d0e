"""Clients of Flower's older kind: a NumPyClient, a Client, and what `to_client()` gives."""

import functools

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord
from flwr.client import Client, NumPyClient
from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)

import fedapps
from clients.core.arrays import from_record, to_record
from fedapps.engines.in_process_grid import InProcessGrid
from strategies import FedAvg

START = {"b": np.full(1, 4, np.float32), "a": np.zeros(2, np.float32)}
NODES = [{"partition-id": i} for i in range(2)]


class Numpy(NumPyClient):
    """Client i multiplies the first array by its config's factor, adds i + 1 to the second, and
    tells what the config says."""

    def __init__(self, number):
        self.number = number

    def fit(self, parameters, config):
        b, a = parameters
        got = {"factor": config["factor"], "note": config["note"], "round": config["server-round"]}
        got |= {"names": int("names" in config), "half": np.float32(0.5)}
        return [b * config["factor"], a + self.number + 1], self.number + 1, got

    def evaluate(self, parameters, config):
        return float(self.number), 2, {"factor": config["factor"], "text": "fine"}


class Plain(Client):
    """The same by Flower's own types, without those of numpy."""

    def __init__(self, number, code=Code.OK):
        self.inner, self.status = Numpy(number), Status(code, "out of order")

    def fit(self, ins):
        new, count, got = self.inner.fit(parameters_to_ndarrays(ins.parameters), ins.config)
        return FitRes(self.status, ndarrays_to_parameters(new), count, got)

    def evaluate(self, ins):
        loss, count, got = self.inner.evaluate([], ins.config)
        return EvaluateRes(self.status, loss, count, got)


def by_cid(cid):
    assert type(cid) is str
    return Numpy(int(cid))


def number(context):
    return int(context.node_config["partition-id"])


def go(client_fn):
    grid = InProcessGrid(fedapps.from_client_fn(client_fn), {}, NODES)
    return FedAvg().start(
        grid,
        to_record(START),
        num_rounds=1,
        train_config=ConfigRecord({"factor": 2, "note": "x"}),
        evaluate_config=ConfigRecord({"factor": 3}),
    )


@pytest.mark.parametrize(
    "client_fn",
    [
        lambda context: Numpy(number(context)),
        lambda context: Numpy(number(context)).to_client(),
        lambda context: Plain(number(context)),
        by_cid,
        lambda cid: Numpy(int(cid)).to_client(),
    ],
)
def test_the_config_comes_and_numbers_go(client_fn):
    """Weights 1 and 2: b is 4 · 2, a is (1·1 + 2·2) / 3; the loss (0 + 1) / 2."""
    result = go(client_fn)
    arrays = from_record(result.arrays)
    assert arrays["b"].tolist() == [8.0]
    assert arrays["a"].tolist() == pytest.approx([5 / 3] * 2)
    got = result.train_metrics_clientapp[1]
    assert isinstance(got, MetricRecord)
    assert (got["factor"], got["round"], got["half"]) == (2.0, 1.0, 0.5)
    assert "note" not in got
    assert got["names"] == 0
    assert result.evaluate_metrics_clientapp[1] == {"factor": 3.0, "loss": 0.5}


def test_what_a_client_does_wrong_is_said(caplog):
    class Short(Numpy):
        def fit(self, parameters, config):
            return parameters[:1], 1, {}

    for client_fn, words in (
        (lambda context: Short(0), "fit got 2 arrays and returned 1"),
        (lambda context: Plain(0, Code.FIT_NOT_IMPLEMENTED), "out of order"),
    ):
        with pytest.raises(RuntimeError, match="0 valid replies of 2"):
            go(client_fn)
        assert words in caplog.text
        caplog.clear()


class Returning(NumPyClient):
    """Writes 1 into each array that it gets, and returns the count and the metrics that it is
    given."""

    def __init__(self, count=3, metrics=None, loss=0.5):
        self.count, self.metrics, self.loss = count, metrics, loss

    def fit(self, parameters, config):
        for array in parameters:
            array[:] = 1
        return parameters, self.count, self.metrics

    def evaluate(self, parameters, config):
        return self.loss, self.count, self.metrics


def test_a_client_may_write_into_what_it_gets():
    """It was read-only, other than in Flower: such a client failed in each round."""
    arrays = from_record(go(lambda context: Returning()).arrays)
    assert {name: array.tolist() for name, array in arrays.items()} == {"b": [1], "a": [1, 1]}


def test_numbers_in_tensors_and_arrays_are_sent_and_others_are_named(caplog):
    """The loss, the accuracy and the count of samples were left out without a word."""
    metrics = {
        "accuracy": torch.tensor(0.75), "f1": np.array(0.5), "text": "x", "flag": True,
        "by class": [0.5, 1.0], "vector": np.ones(2),
    }  # fmt: skip
    result = go(lambda context: Returning(torch.tensor(4), metrics, torch.tensor(0.25)))
    for got in (result.train_metrics_clientapp[1], result.evaluate_metrics_clientapp[1]):
        assert (got["accuracy"], got["f1"]) == (0.75, 0.5)
        assert not {"text", "flag", "by class", "vector"} & got.keys()
    assert result.evaluate_metrics_clientapp[1]["loss"] == 0.25
    assert "evaluate returned 'by class' as a list, which is left out" in caplog.text
    assert "evaluate returned 'vector' as a ndarray, which is left out" in caplog.text
    assert "'text'" not in caplog.text


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (None, "client_fn returned a NoneType; it must return a NumPyClient or a Client"),
        (Returning(count="many"), "fit returned 'many' as its number of samples"),
        (Returning(count=None), "fit returned None as its number of samples"),
    ],
    ids=["no client", "text", "none"],
)
def test_what_is_no_client_or_count_is_refused(client, words):
    with pytest.raises(RuntimeError, match=words):
        go(lambda context: client)


def test_a_fit_that_returns_too_little_is_told_what_to_return():
    class Two(Returning):
        def fit(self, parameters, config):
            return parameters, 3

    with pytest.raises(RuntimeError, match="fit returned 2 values; it must return arrays, the num"):
        go(lambda context: Two())


def test_a_client_fn_may_have_arguments_of_ones_own():
    """functools.partial leaves them in the signature, with their values."""

    def made(context, count):
        return Returning(count)

    assert len(go(functools.partial(made, count=2)).arrays) == 2
    with pytest.raises(ValueError, match="client_fn takes context, count; it must take a Context"):
        fedapps.from_client_fn(made)
    with pytest.raises(ValueError, match="client_fn takes nothing; it must take a Context alone"):
        fedapps.from_client_fn(lambda: None)
