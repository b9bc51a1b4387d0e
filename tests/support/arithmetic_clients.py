"""The smallest of federations: clients of one array, whose numbers are worked out by hand."""

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.core.arrays import from_record, to_record
from clients.core.protocol import CAPABILITIES, RESTORE_STATE, SAVE_STATE
from fedapps.engines.in_process_grid import InProcessGrid

START = {"w": np.full(2, 100, np.float32)}


def society(novel=(), spoil=None, joined=None, replied=None):
    """A ClientApp of clients that are `novel`; node i adds i to all it gets, is right on 1/i of its
    i samples, and doubles what it is asked to. Also returns (action, node) of each message.

    `spoil` changes the train replies of node 1. `joined` and `replied` are sample counts by node:
    those of the first answers, and of train replies."""
    client_app = ClientApp()
    heard = []

    def reply(message, arrays, numbers):
        content = {"arrays": to_record(arrays), "metrics": MetricRecord(numbers)}
        return Message(RecordDict(content), reply_to=message)

    @client_app.query()
    def query(message, context):
        i = context.node_id
        said = {CAPABILITIES: "", "client": i, "novel": i in novel}
        said |= {"num-examples": joined[i]} if joined else {}
        return Message(RecordDict({"properties": ConfigRecord(said)}), reply_to=message)

    @client_app.train()
    def train(message, context):
        i = context.node_id
        heard.append(("train", i))
        arrays = from_record(message.content["arrays"])
        moved = {n: a + np.float32(i) for n, a in arrays.items()}
        answer = reply(message, moved, {"num-examples": replied[i] if replied else 1})
        if spoil is not None and i == 1:
            spoil(answer)
        return answer

    @client_app.evaluate()
    def evaluate(message, context):
        i = context.node_id
        heard.append(("evaluate", i))
        return reply(message, {}, {"num-examples": i, "accuracy": 1 / i})

    @client_app.query("double")
    def double(message, context):
        arrays = from_record(message.content["arrays"])
        return reply(message, {n: 2 * a for n, a in arrays.items()}, {})

    @client_app.train(RESTORE_STATE.partition(".")[2])
    def recall(message, context):
        heard.append((RESTORE_STATE, context.node_id))
        return reply(message, {}, {})

    @client_app.query(SAVE_STATE.partition(".")[2])
    def keep(message, context):
        state = {"kept": np.full(1, context.node_id)} if context.node_id > 1 else {}
        return reply(message, state, {})

    return client_app, heard


def go(strategy, *, nodes=3, num_rounds=1, grid=InProcessGrid, **options):
    """Runs the strategy; returns its result, what clients heard and each round's report."""
    client_app, heard = society(**options)
    reports = []
    strategy.on_round = lambda report: reports.append(dict(report))
    grid = grid.simulation(client_app, {}, nodes)
    return strategy.start(grid, to_record(START), num_rounds=num_rounds), heard, reports


def asked(heard, kind):
    """The nodes that got a message of this kind."""
    return [node for action, node in heard if action == kind]
