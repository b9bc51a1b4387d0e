"""Runs of `client_app` and `server_app` in this process, around a user's network and data."""

from flwr.app import Context, RecordDict

import fedapps
from clients.core.arrays import from_record
from fedapps.engines.in_process_grid import InProcessGrid

BOTH = ("task", "head", "seed", "standardize", "fedavg_rounds")  # settings that both halves need


def run_components(
    method, model, data, shape, *, rounds=1, count=1, public=None, loss=None, **client_settings
):
    """The server's arrays after `rounds` rounds, and the metrics of the last evaluation.

    `data` is a function of the node's number, or the same data for all `count` nodes."""
    settings = {"local_steps": 3} | client_settings
    if not {"optimizer", "scheduler"} & settings.keys():
        settings.setdefault("lr", 0.1)
    both = {name: settings[name] for name in BOTH if name in settings}

    def of_node(context):
        return data(context.node_config["partition-id"]) if callable(data) else data

    ended = []
    client = fedapps.client_app(
        method, model=model, data=of_node, public=public, loss=loss, **settings
    )
    server = fedapps.server_app(
        method,
        model=model,
        shape=shape,
        rounds=rounds,
        min_available_nodes=count,
        then=lambda *result: ended.extend(result),
        **both,
    )
    grid = InProcessGrid(client, {}, [{"partition-id": i} for i in range(count)])
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    result, _ = ended
    return from_record(result.arrays), dict(result.evaluate_metrics_clientapp[rounds])
