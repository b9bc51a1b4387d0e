"""Shares and replies small enough to work by hand."""

import torch

from clients.arrays import Arrays
from fedapps.client_app import app
from fedapps.config import defaults
from fedapps.engines.grid import InProcessGrid
from fedapps.server_app import run
from partitions.shares import Samples, Share
from strategies.replies import Node, Update

# Six clients of the embedded digits, two rounds, every one evaluated.
SMALL = defaults() | {"num-clients": 6, "rounds": 2, "local-steps": 3, "evaluate-every": 1}


def share(x, y, *, validation=None):
    """A training client's share of inputs x and labels y; validated on `validation` rows."""
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    rows = torch.arange(len(y))
    everything = Samples(x, y, rows, scale=1.0)
    held = rows[:0] if validation is None else torch.as_tensor(validation)
    return Share(everything, Samples(x, y, held, scale=1.0), None, everything, False)


def update(client: int, arrays: Arrays, n: int = 1, **metrics) -> Update:
    """A reply of training client `client` on the node of the same id."""
    return Update(Node(client, client), arrays, n, metrics)


def federate(**changes):
    """Run SMALL with `changes` in process; returns the result and the grid with its nodes."""
    config = SMALL | changes
    grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
    return run(grid, config, "in-process"), grid


def states(grid, method):
    """The clients' states by node, of those that have one."""
    key = f"fedapps.{method}"
    return {
        node: {name: array.numpy() for name, array in context.state[key].items()}
        for node, context in grid.contexts.items()
        if key in context.state
    }
