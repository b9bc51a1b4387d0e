"""Clients that never trained cost a simulation next to no memory."""

import pickle

import pytest
import small_runs
from flwr.app import Message, RecordDict

from fedapps.clientapp import app
from fedapps.engines.in_process_grid import Contexts, InProcessGrid, Simulated


def stored(grid):
    """The nodes whose context is kept."""
    return {i for i in grid.contexts if grid.contexts.passing(i) is grid.contexts.passing(i)}


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_contexts_are_kept_for_clients_with_state_alone(method):
    """FedAvg's clients have none; FedPer's have the head that they trained."""
    trained = set()

    class Grid(InProcessGrid):
        def _deliver(self, message):
            if message.metadata.message_type == "train":
                trained.add(message.metadata.dst_node_id)
            return super()._deliver(message)

    _, grid = small_runs.federate(Grid, method=method, rounds=1, **{"fraction-train": 0.4})
    assert 0 < len(trained) < len(grid.contexts) - 1
    assert stored(grid) == (trained if method == "fedper" else set())


def test_a_context_that_was_asked_for_is_the_one_that_its_client_gets():
    grid = InProcessGrid.simulation(app, small_runs.SMALL, 2)
    context = grid.contexts[2]
    context.node_config["mine"] = 1
    assert grid.contexts[2] is context
    assert grid.contexts.passing(2) is context
    assert [dict(c.node_config) for c in grid.contexts.values()] == [
        {"partition-id": 0, "num-partitions": 2, "simulated": True},
        {"partition-id": 1, "num-partitions": 2, "simulated": True, "mine": 1},
    ]


@pytest.mark.parametrize("node", [0, 3])
def test_a_node_that_does_not_exist_has_no_context_and_answers_with_an_error(node):
    grid = InProcessGrid.simulation(app, small_runs.SMALL, 2)
    (reply,) = grid.send_and_receive([Message(RecordDict(), node, "query")])
    assert reply.error.reason == "there is no such node"
    assert node not in grid.contexts
    with pytest.raises(KeyError):
        grid.contexts[node]


def test_the_configurations_of_simulated_nodes_are_made_when_they_are_read():
    nodes = Simulated(100_000, debug=True)
    assert len(pickle.dumps(nodes)) < 200
    last = {"partition-id": 99_999, "num-partitions": 100_000, "simulated": True, "debug": True}
    assert nodes[-1] == last == Contexts({}, nodes)[100_000].node_config
    assert [node["partition-id"] for node in nodes[1:7:3]] == [1, 4]
    with pytest.raises(IndexError):
        nodes[100_000]
