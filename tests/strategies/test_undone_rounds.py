"""A round that would bring NaN into the server's state leaves no trace but in the report."""

import numpy as np
import pytest
from small_runs import SMALL, answering

from clients.core.arrays import from_record, to_record
from fedapps.clientapp import answer
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run
from strategies.core import limits


def go(method, rounds, poisoned=0):
    """The run's arrays and train metrics; in round `poisoned` all send entries of 3e38."""
    config = SMALL | {"method": method, "rounds": rounds, "fraction-evaluate": 0.2}

    def handle(message, context):
        reply = answer(message, context)
        got = message.content.config_records.get("config", {})
        if message.metadata.message_type == "train" and got.get("server-round") == poisoned:
            arrays = from_record(reply.content["arrays"])
            reply.content["arrays"] = to_record(
                {n: np.full_like(a, 3e38) for n, a in arrays.items()}
            )
        return reply

    client_app = answering(method, handle)
    result = run(InProcessGrid.simulation(client_app, config, 6), config, "in-process")
    return from_record(result.arrays), result.train_metrics_clientapp


@pytest.mark.parametrize("method", ["scaffold", "pfedhn", "odpfl-hn"])
def test_the_first_round_can_be_undone(method, monkeypatch):
    monkeypatch.setattr(limits, "ABSURD", np.inf)
    monkeypatch.setattr(limits, "LARGEST_NORM", np.inf)
    arrays, metrics = go(method, 2, poisoned=1)
    assert [metrics[n].get("undone") for n in (1, 2)] == [1, None]
    assert all(np.isfinite(a).all() for a in arrays.values() if a.dtype.kind == "f")


@pytest.mark.parametrize("method", ["scaffold", "pfedhn", "odpfl-hn"])
def test_the_state_is_that_before_the_round(method, monkeypatch):
    """With the check of sizes off: the second of two rounds is undone and leaves one round's
    arrays; a third goes on from them as if nothing had been, momentum included."""
    monkeypatch.setattr(limits, "ABSURD", np.inf)
    monkeypatch.setattr(limits, "LARGEST_NORM", np.inf)
    one, _ = go(method, 1)
    two, metrics = go(method, 2, poisoned=2)
    assert metrics[2]["undone"] == 1
    assert "undone" not in metrics[1]
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(two[name], array)
    three, metrics = go(method, 3, poisoned=2)
    assert "undone" not in metrics[3]
    assert all(np.isfinite(a).all() for a in three.values() if a.dtype.kind == "f")
    assert any((three[name] != array).any() for name, array in one.items())
