"""Hostile and failing replies to every message of every method: only their senders are affected."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from malformed_replies import MALFORMED, OPENINGS, due_cause
from small_runs import ALL_SAMPLES, FEWER, NEEDS, WEE, answering

from clients.core.arrays import from_record
from fedapps.clientapp import answer, app
from fedapps.engines.in_process_grid import InProcessGrid, error_reply
from fedapps.methods import METHODS
from fedapps.serverapp import run
from fedapps.settings.config import defaults

SMALL = {"num-clients": 8, "train-fraction": 0.875, "local-steps": 1, "evaluate-every": 4}
SMALL |= {"model": "mlp-small"} | FEWER
# Where no honest client can play newcomers, hostile ones alone say what is usual.
NEEDS_HERE = NEEDS | {"auto": ALL_SAMPLES}
HOSTILE = 3  # of seven training clients; one more never identifies itself properly
FAILING, MALFORMING = 0.3, 0.1  # shares of the replies
SEEDS = range(5)
# The largest loss of mean accuracy over the seeds, at the best and at the last round.
LOSSES = {"fedavg": (0.02, 0.04)}


def rotated(things, start):
    things = list(things)
    return things[start % len(things) :] + things[: start % len(things)]


def attacked(method, start, rounds):
    """The method's ClientApp, whose hostile clients spoil all their replies in turn, and what they
    sent: action, malformation, and the expected cause of the drop."""
    kinds, openings = rotated(MALFORMED, start), iter(rotated(OPENINGS, start)[: rounds - 1])
    hostile, taken, spoilt = [], [], []

    def handle(message, context):
        reply = answer(message, context)
        action = message.metadata.message_type
        if action == "query":
            properties = reply.content["properties"]
            new = not properties["novel"] and context.node_id not in hostile
            if new and len(hostile) <= HOSTILE:
                hostile.append(context.node_id)
                taken.append(properties["client"])
            if context.node_id in hostile[HOSTILE:]:
                opening = next(openings, {"client": taken[0]})
                due = "identity" if opening == {"client": taken[0]} else "malformed"
                spoilt.append((action, str(opening), due))
                properties.update(opening)
        elif context.node_id in hostile:
            kind = kinds[len(spoilt) % len(kinds)]
            spoilt.append((action, kind, due_cause(kind, reply)))
            MALFORMED[kind](reply)
        return reply

    return answering(method, handle), spoilt


def simulation(kind, client_app, folder, **changes):
    """A grid of this kind, and the configuration of its run."""
    config = defaults() | {"output-dir": str(folder), "checkpoint-every": 0} | changes
    return kind.simulation(client_app, config, int(config["num-clients"])), config


def finish(grid, config, folder):
    """The result of a run, and the causes of all drops.

    The engine is "deployment", which does not ask clients for their states."""
    result = run(grid, config, "deployment")
    for name, array in from_record(result.arrays).items():
        assert array.dtype.kind != "f" or np.isfinite(array).all(), name
    causes: Counter[str] = Counter()
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        causes.update(json.loads(line)["dropped"])
        causes.update(json.loads(line).get("evaluation-dropped", {}))
    return result, causes


def attack(method, rounds, folder):
    """A run with hostile clients, who start with another malformation for each method."""
    client_app, spoilt = attacked(method, list(METHODS).index(method) * 5, rounds)
    changes = WEE | SMALL | {"method": method, "rounds": rounds}
    changes |= NEEDS_HERE.get(method, {})
    grid, config = simulation(InProcessGrid, client_app, folder, **changes)
    result, causes = finish(grid, config, folder)
    # A client whose reply to an exchange before training is always refused is not asked to train.
    assert {"train", *METHODS[method].client.exchanges} & {action for action, _, _ in spoilt}
    for metrics in result.evaluate_metrics_clientapp.values():
        assert all(math.isfinite(value) for value in metrics.values())
        assert 0 <= metrics.get("train-accuracy", 0) <= 1
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == rounds
    assert causes == Counter(due for _, _, due in spoilt if due)
    return spoilt


@pytest.mark.parametrize("method", METHODS)
def test_hostile_replies_affect_only_their_senders(method, tmp_path):
    """Half of the training clients send malformed replies, and each counts under its cause."""
    attack(method, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_malformation_of_every_method(method, tmp_path):
    """As above, until each of them has been sent."""
    sent = {kind for _, kind, _ in attack(method, 48, tmp_path)}
    assert sent >= MALFORMED.keys() | set(map(str, OPENINGS))


class Disturbed(InProcessGrid):
    """Spoils replies to training and all its exchanges at random; `due` counts them by cause.

    Evaluations are not disturbed, so that accuracies are means over the same clients."""

    def _deliver(self, message):
        reply, kind = super()._deliver(message), message.metadata.message_type
        if kind in ("query", "evaluate"):
            return reply
        chance = self.chance.uniform()
        if chance < FAILING:
            self.due["error"] += 1
            return error_reply(message, "no answer today")
        if chance < FAILING + MALFORMING:
            malformation = self.chance.choice(list(MALFORMED))
            self.due.update(filter(None, [due_cause(malformation, reply)]))
            MALFORMED[malformation](reply)
        return reply


def accuracies(method, seed, disturbed, folder):
    """Training clients' accuracy at the best and at the last round."""
    kind = Disturbed if disturbed else InProcessGrid
    grid, config = simulation(kind, app, folder, method=method, seed=seed, rounds=50)
    grid.chance, grid.due = np.random.default_rng(seed), Counter()
    _, causes = finish(grid, config, folder)
    assert causes == grid.due and bool(causes) == disturbed
    summary = json.loads((folder / "summary.json").read_text())
    name = "train-accuracy"
    return summary["evaluation"][name], summary["last"]["evaluation"][name]


@pytest.mark.slow
@pytest.mark.parametrize("method", LOSSES)
def test_bad_replies_cost_little_accuracy(method, tmp_path):
    """In every round, three replies of ten fail and one is malformed."""
    undisturbed, disturbed = (
        np.array([accuracies(method, s, bad, tmp_path / f"{bad}-{s}") for s in SEEDS])
        for bad in (False, True)
    )
    print(f"{method}, best and last: {undisturbed.tolist()}, disturbed {disturbed.tolist()}")
    assert (disturbed.mean(0) > undisturbed.mean(0) - LOSSES[method]).all()
