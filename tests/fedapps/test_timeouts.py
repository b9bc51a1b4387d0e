"""What a timeout counts in process: the seconds of each client's own work."""

import time

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from clients.core.arrays import to_record
from fedapps.engines.in_process_grid import InProcessGrid
from strategies import FedAvg

SLOW, TIMEOUT = 2, 0.5  # a node, and seconds
START = to_record({"w": np.zeros(2, np.float32)})


def federation(**options):
    """Three nodes that count their trainings in their state; node 2 takes 0.6 seconds for each."""
    client_app = ClientApp()

    @client_app.train()
    def train(message, context):
        if context.node_id == SLOW:
            time.sleep(TIMEOUT + 0.1)
        done = int(context.state["count"]["n"]) if "count" in context.state else 0
        context.state["count"] = ConfigRecord({"n": done + 1})
        records = {"arrays": message.content["arrays"]}
        records["metrics"] = MetricRecord({"num-examples": 1})
        return Message(RecordDict(records), reply_to=message)

    @client_app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": 1, "score": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return InProcessGrid.simulation(client_app, {}, 3, *options.values())


def trainings(grid):
    """How often each node has trained, by its state."""
    return {
        node: int(context.state["count"]["n"])
        for node, context in grid.contexts.items()
        if "count" in context.state
    }


@pytest.mark.filterwarnings("ignore:.*stacked-clients=3 has no effect")
@pytest.mark.parametrize("size", [1, 3])
def test_a_client_that_works_longer_has_no_reply_and_no_new_state(size):
    grid = federation(cohort=size)

    def train(timeout):
        content = RecordDict({"arrays": START})
        messages = [Message(content, node, "train") for node in (1, 2, 3)]
        return list(grid.send_and_receive(messages, timeout=timeout))

    first, slow, last = train(TIMEOUT)
    assert not first.has_error() and not last.has_error()
    assert slow.error.code == ErrorCode.NODE_UNAVAILABLE
    assert "no reply within 0.5 s" in slow.error.reason
    assert trainings(grid) == {1: 1, 3: 1}
    assert not any(reply.has_error() for reply in train(None))
    assert trainings(grid) == {1: 2, 2: 1, 3: 2}


def test_a_late_client_counts_as_missing_and_the_round_goes_on():
    grid, reports = federation(), []
    FedAvg(on_round=reports.append).start(grid, START, num_rounds=1, timeout=TIMEOUT)
    assert (reports[0]["valid"], reports[0]["dropped"]) == (2, {"missing": 1})
