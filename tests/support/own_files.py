"""Runs on files of a user's data, and the rows that their clients hold."""

import numpy as np

import partitions
from fedapps.clientapp import app
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.planning import check
from fedapps.serverapp import run
from fedapps.settings.config import defaults

CLIENTS = 4
SPLIT = {"partition": "iid", "num-clients": CLIENTS, "local-steps": 10, "batch-size": 32}


def configuration(path, rounds=3, **changes):
    """Four clients with equal shares; two of them train."""
    config = defaults() | SPLIT | {"dataset": str(path), "rounds": rounds, "evaluate-every": rounds}
    return config | changes


def trained(path, rounds=3, **changes):
    """The scores of a run, checked as the command does, and its federation."""
    config = configuration(path, rounds, **changes)
    federation = partitions.federation(config)
    check(config)
    grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
    result = run(grid, config, "in-process")
    return result.evaluate_metrics_clientapp[rounds], federation


def rows_of(federation):
    """The rows of the file that train, and those of each novel client."""
    training = []
    novel = []
    for client in range(CLIENTS):
        share = federation.share(client)
        if share.novel:
            novel.append(share.everything.index.numpy())
        else:
            training.append(share.train.index.numpy())
    return np.concatenate(training), novel
