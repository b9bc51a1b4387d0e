"""Clients of Flower's older kind: a NumPyClient, a Client, and what `to_client()` gives."""

import numpy as np
import pytest
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
