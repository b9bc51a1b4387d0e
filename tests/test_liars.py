"""What one client gains, and the others lose, when it lies plausibly about what it is."""

import numpy as np
import pytest
from small_runs import SMALL, TASTES, answering

from clients.core.arrays import from_record, to_record
from fedapps.clientapp import answer
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run


def federation(method, change, **settings):
    """A run whose replies `change` may alter, by node: what each node got before its evaluation,
    and the training clients' accuracy."""
    sent = {}

    def handle(message, context):
        action = message.metadata.message_type
        if action == "evaluate":
            sent[context.node_id] = from_record(message.content["arrays"])
        reply = answer(message, context)
        change(action, context.node_id, reply)
        return reply

    config = SMALL | {"method": method, "checkpoint-every": 0} | settings
    grid = InProcessGrid.simulation(answering(method, handle), config, int(config["num-clients"]))
    result = run(grid, config, "deployment")
    return sent, result.evaluate_metrics_clientapp[config["rounds"]].get("train-accuracy")


def test_a_copied_descriptor_gives_the_victims_generated_model():
    """Node 2 sends node 1's descriptor: the server sends it the very model that node 1 gets."""
    victim = {}

    def copy(action, node, reply):
        if action == "query.encode" and node == 1:
            victim["e"] = reply.content["arrays"]
        elif action == "query.encode" and node == 2:
            reply.content["arrays"] = victim["e"]

    honest, lied = (federation("odpfl-hn", lie)[0] for lie in (lambda *_: None, copy))
    same = [
        all(np.array_equal(sent[1][name], sent[2][name]) for name in sent[1])
        for sent in (honest, lied)
    ]
    assert same == [False, True]


@pytest.mark.parametrize(("ratio", "least", "most"), [(4.0, 0.5, 10.0), (0.0, 10.0, 1e9)])
def test_a_volunteer_that_lies_moves_the_prototype_of_its_sub_population_alone(ratio, least, most):
    """A hundred times too large, and of a sub-population that is not its own. The limit on the
    length of a reply makes less of it."""
    lies = []

    def lie(action, node, reply):
        if action == "query" and "prototype" in reply.content["properties"]:
            kind = reply.content["properties"]["prototype"]
            if not lies and kind:
                lies.append((node, kind - 1))
            if lies and lies[0][0] == node:
                reply.content["properties"]["prototype"] = lies[0][1]
        elif action == "query.prototype" and lies and node == lies[0][0]:
            arrays = from_record(reply.content["arrays"])
            reply.content["arrays"] = to_record({n: 100 * a for n, a in arrays.items()})

    settings = TASTES | {"num-clients": 20, "train-fraction": 1.0, "rounds": 1}
    settings |= {"max-update-ratio": ratio}
    runs = (federation("fedembed", change, **settings)[0] for change in (lambda *_: None, lie))
    before, after = (next(iter(sent.values())) for sent in runs)
    kinds = {
        name: dict(zip(sent["assignment/heads"].tolist(), sent["assignment/centers"], strict=True))
        for name, sent in (("before", before), ("after", after))
    }
    moved = {
        k: float(np.linalg.norm(kinds["after"][k] - v))
        for k, v in kinds["before"].items()
        if k in kinds["after"]
    }
    assert max(moved, key=moved.get) == lies[0][1] and least < moved[lies[0][1]] < most
    assert sorted(moved.values())[-2] < least


LIES = {
    "honest": lambda action, arrays: arrays,
    "flipped": lambda action, arrays: (
        {name: -10 * array for name, array in arrays.items()} if action == "train" else arrays
    ),
    "equal": lambda action, arrays: {
        name: np.broadcast_to(array[:1], array.shape).copy() for name, array in arrays.items()
    },
    "zero": lambda action, arrays: {name: 0 * array for name, array in arrays.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedma", "fedavg"])
def test_absurd_neurons_cost_accuracy(method):
    """One of eight training clients sends them: docs/how-to/real-nodes.md has the numbers."""
    settings = {"num-clients": 10, "train-fraction": 0.8, "rounds": 8, "evaluate-every": 8}
    accuracies = {}
    for name, lie in LIES.items():
        liars = []

        def change(action, node, reply, lie=lie, liars=liars):
            if action == "query" and not reply.content["properties"]["novel"] and not liars:
                liars.append(node)
            if action != "query" and node in liars:
                for key, record in list(reply.content.array_records.items()):
                    reply.content[key] = to_record(lie(action, from_record(record)))

        accuracies[name] = federation(method, change, **settings, **{"local-steps": 20})[1]
    print(method, accuracies)
    assert accuracies["honest"] > max(accuracies["equal"], accuracies["zero"])
    assert min(accuracies["equal"], accuracies["zero"]) > accuracies["flipped"]
