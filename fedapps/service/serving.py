"""A finished run serves the nodes of a SuperLink until it is stopped.

A node is served once, and again when its data have changed or it is told to. That is the node's
to know: the server asks whether it wants its model, and learns nothing of the data."""

import time
from logging import INFO
from pathlib import Path

from flwr.common.logger import log
from flwr.serverapp import Grid

from clients.arrays import Arrays
from fedapps.service.run import Run, hand_out, opened
from fedapps.settings.config import Config
from strategies.base import PersonalizedStrategy
from strategies.replies import Node

LINE = "served by fedapps:"  # start of a line for people


def check_serving(config: Config) -> None:
    """Raise ValueError for settings out of range."""
    if not Path(str(config["serve-dir"])).is_absolute():
        raise ValueError(f"serve-dir is {config['serve-dir']!r}; it must be an absolute path")
    for key in ("serve-every", "serve-timeout"):
        if not 0 < float(config[key]) < float("inf"):
            raise ValueError(f"{key} is {config[key]}; it must be more than 0 seconds")


def serve(grid: Grid, config: Config) -> None:
    """Serve whoever is there, every ``serve-every`` seconds; never returns."""
    check_serving(config)
    run = Run(str(config["serve-dir"]))
    strategy = opened(run, grid)
    strategy.timeout = float(config["serve-timeout"])
    again: set[int] | None = set() if config["serve-again"] else None
    told: dict[int, str] = {}  # what was last said of a client
    while True:
        for client, line in serve_once(strategy, run, again).items():
            if told.get(client) != line:
                told[client] = line
                log(INFO, "%s client %s: %s", LINE, client, line)
        time.sleep(float(config["serve-every"]))


def serve_once(
    strategy: PersonalizedStrategy, run: Run, again: set[int] | None = None
) -> dict[int, str]:
    """Serve the nodes that are there and want it; a line about each of those, by client.

    Clients that are not in `again` yet are served anew, and put there."""
    try:
        nodes = strategy.present()
    except RuntimeError as error:  # nobody is there, or nobody could start
        return {-1: f"waiting: {error}"} if "could start" in str(error) else {}
    able = [node for node in nodes if run.novel or not node.novel]
    lines = {n.client: f"{run.method} has no model without labels" for n in nodes if n not in able}
    wanting = wishes(strategy, able, again)
    if not wanting:
        return lines
    refused = hand_out(strategy, wanting)
    for node in wanting:
        role = "novel" if node.novel else "training"
        lines[node.client] = refused.get(node.client, f"has its model now ({role})")
        if again is not None and node.client not in refused:
            again.add(node.client)
    return lines


def wishes(strategy: PersonalizedStrategy, nodes: list[Node], again: set[int] | None) -> list[Node]:
    """The nodes that want their model."""
    found = []
    for anew in (False, True):
        asked = [n for n in nodes if (again is not None and n.client not in again) == anew]
        if asked:
            payloads: dict[Node, Arrays] = {node: {} for node in asked}
            replies = strategy.exchange("query.wants", payloads, {"again": anew})
            found += [reply.node for reply in replies if reply.metrics.get("wants")]
    return sorted(found)
