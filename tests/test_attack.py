"""Hostile replies of every kind to every message of every method: nobody else pays for them."""

import io
import math

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord
from tiny import NEEDS, answering

from clients.arrays import from_record, to_record
from fedapps.bridge import answer
from fedapps.clientapp import make_client
from fedapps.config import defaults
from fedapps.engines.grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.serverapp import run

SMALL = {"num-clients": 7, "train-fraction": 0.86, "rounds": 4, "local-steps": 1}
HOSTILE = 3  # of six training clients


def file(save, *content, **options):
    written = io.BytesIO()
    save(written, *content, **options)
    return written.getvalue()


def header(shape):
    """A .npy file of 8 bytes whose header claims another shape, or none at all."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)


BYTES = {
    "empty": b"",
    "zip": file(np.savez, w=np.ones(2)),
    "pickle": file(np.save, np.array([print]), allow_pickle=True),
    "texts": file(np.save, np.array(["a", "b"])),
    "huge": header("(1000000000000000,)"),
    "negative": header("(-1, -2)"),
    "garbled": header("(((("),
    "unclosed": header("'''"),
}
VALUES = {"nan": math.nan, "infinity": math.inf, "1e10": 1e10, "3e38": 3e38, "-1e20": -1e20}
TOLD = {
    f"{name} is {value!r:.20}": {name: value}
    for name in ("num-examples", "loss", "risk", "dp-sigma", "accuracy", "counts", "head")
    for value in ("many", b"\0", True, [1.0, 2.0], [], -3.5, 1e300)
}


def with_bytes(data):
    def spoil(reply):
        for record in reply.content.array_records.values():
            for array in record.values():
                array.data = data

    return spoil


def with_value(value):
    def spoil(reply):
        for key, record in reply.content.array_records.items():
            arrays = from_record(record)
            wrong = {n: a + a.dtype.type(value) for n, a in arrays.items() if a.dtype.kind == "f"}
            reply.content[key] = to_record(arrays | wrong)

    return spoil


def with_told(values):
    def spoil(reply):
        for record in reply.content.metric_records.values():
            for name in values.keys() & record.keys():
                del record[name]
        reply.content["more"] = ConfigRecord(values)

    return spoil


def without_metrics(reply):
    reply.content["metrics"] = MetricRecord({})


MALFORMED = {
    **{f"bytes: {name}": with_bytes(data) for name, data in BYTES.items()},
    **{f"values: {name}": with_value(value) for name, value in VALUES.items()},
    **{f"told: {name}": with_told(values) for name, values in TOLD.items()},
    "no metrics": without_metrics,
}


def attacked(method, kinds):
    """The method's ClientApp; three training clients spoil all their replies, by turns."""
    spoils, hostile, spoilt = [MALFORMED[kind] for kind in kinds], set(), []

    def handle(message, context):
        reply = answer(message, context, make_client)
        action = message.metadata.message_type
        if action == "query":
            novel = reply.content["properties"]["novel"]
            if not novel and len(hostile) < HOSTILE:
                hostile.add(context.node_id)
        elif context.node_id in hostile:
            spoils[len(spoilt) % len(spoils)](reply)
            spoilt.append(action)
        return reply

    return answering(method, handle), spoilt


@pytest.mark.parametrize("method", METHODS)
def test_hostile_replies_cost_their_senders_alone(method):
    """Half of the training clients send the malformations one after the other, each method's
    series beginning elsewhere."""
    kinds = list(MALFORMED)
    start = list(METHODS).index(method) * 5 % len(kinds)
    config = defaults() | SMALL | {"method": method, "evaluate-every": 4} | NEEDS.get(method, {})
    client_app, spoilt = attacked(method, kinds[start:] + kinds[:start])
    grid = InProcessGrid.simulation(client_app, config, int(config["num-clients"]))
    result = run(grid, config, "in-process")
    # Whose every answer to an exchange before training is refused is not asked to train.
    assert {"train", *METHODS[method].client.exchanges} & set(spoilt)
    for name, array in from_record(result.arrays).items():
        assert array.dtype.kind != "f" or np.isfinite(array).all(), name
    rounds = result.train_metrics_clientapp.values()
    assert len(rounds) == config["rounds"]
    dropped = sum(n for told in rounds for key, n in told.items() if key.startswith("dropped-"))
    if method != "local":  # whose replies hold no arrays that could be malformed
        assert dropped
    for told in result.evaluate_metrics_clientapp.values():
        assert all(math.isfinite(value) for value in told.values())
        assert 0 <= told.get("train-accuracy", 0) <= 1
