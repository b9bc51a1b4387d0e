"""Hostile replies of every kind to every message of every method: nobody else pays for them."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hostile import MALFORMED, SAID, due_cause
from tiny import NEEDS, answering

from clients.arrays import from_record
from fedapps.clientapp import make_client
from fedapps.engines.grid import InProcessGrid
from fedapps.methods import METHODS
from fedapps.node.bridge import answer
from fedapps.serverapp import run
from fedapps.settings.config import defaults

SMALL = {"num-clients": 8, "train-fraction": 0.875, "local-steps": 1}
HOSTILE = 3  # of seven training clients; one more never says properly who it is


def turned(things, start):
    things = list(things)
    return things[start % len(things) :] + things[: start % len(things)]


def attacked(method, start, rounds):
    """The method's ClientApp, whose hostile clients spoil all their replies by turns, and what they
    sent: kind of the message and of the malformation, and the cause that is due."""
    kinds, openings = turned(MALFORMED, start), iter(turned(SAID, start)[: rounds - 1])
    hostile, taken, spoilt = [], [], []

    def handle(message, context):
        reply = answer(message, context, make_client)
        action = message.metadata.message_type
        if action == "query":
            told = reply.content["properties"]
            if not told["novel"] and context.node_id not in hostile and len(hostile) <= HOSTILE:
                hostile.append(context.node_id)
                taken.append(told["client"])
            if context.node_id in hostile[HOSTILE:]:
                said = next(openings, {"client": taken[0]})
                due = "identity" if said == {"client": taken[0]} else "malformed"
                spoilt.append((action, str(said), due))
                told.update(said)
        elif context.node_id in hostile:
            kind = kinds[len(spoilt) % len(kinds)]
            spoilt.append((action, kind, due_cause(kind, reply)))
            MALFORMED[kind](reply)
        return reply

    return answering(method, handle), spoilt


def attack(method, rounds, folder):
    """A run whose hostile clients begin elsewhere for each method; what they sent."""
    config = defaults() | SMALL | {"method": method, "rounds": rounds, "evaluate-every": 4}
    config |= {"output-dir": str(folder), "checkpoint-every": 0} | NEEDS.get(method, {})
    client_app, spoilt = attacked(method, list(METHODS).index(method) * 5, rounds)
    grid = InProcessGrid.simulation(client_app, config, int(config["num-clients"]))
    result = run(grid, config, "deployment")  # where clients are not asked what they keep
    # Whose every answer to an exchange before training is refused is not asked to train.
    assert {"train", *METHODS[method].client.exchanges} & {action for action, _, _ in spoilt}
    for name, array in from_record(result.arrays).items():
        assert array.dtype.kind != "f" or np.isfinite(array).all(), name
    for told in result.evaluate_metrics_clientapp.values():
        assert all(math.isfinite(value) for value in told.values())
        assert 0 <= told.get("train-accuracy", 0) <= 1
    reports = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(reports) == rounds
    counted = Counter()
    for report in reports:
        counted.update(report["dropped"])
        counted.update(report.get("evaluation-dropped", {}))
    assert counted == Counter(due for _, _, due in spoilt if due)
    return spoilt


@pytest.mark.parametrize("method", METHODS)
def test_hostile_replies_cost_their_senders_alone(method, tmp_path):
    """Half of the training clients send malformations, and each counts under its cause."""
    attack(method, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_malformation_of_every_method(method, tmp_path):
    """As above, until each of them has been sent."""
    sent = {kind for _, kind, _ in attack(method, 48, tmp_path)}
    assert sent >= MALFORMED.keys() | set(map(str, SAID))
