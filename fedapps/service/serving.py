"""A finished run serves the nodes of a SuperLink until it is stopped.

A node is served once, and again if its data changed or it is asked to. The node decides: the server
asks whether it wants its model, and learns nothing of the data."""

import logging
import time
from pathlib import Path

from flwr.serverapp import Grid

from clients.core.arrays import Arrays
from clients.core.protocol import AGAIN, WANTED, WANTS
from fedapps.service.finished_run import FAILED, FinishedRun, hand_out, restore_strategy
from fedapps.settings.config import Config
from strategies.core.replies import Node
from strategies.core.roster import NoClientStartsError
from strategies.core.strategy import PersonalizedStrategy

LINE = "served by fedapps:"  # start of the log lines that `fedapps serve` prints
NO_CLIENT = -1  # stands for a client's id in a line about nodes that have none


def check_serving(config: Config) -> None:
    """Raise ValueError for settings out of range."""
    if not Path(str(config["serve-dir"])).is_absolute():
        raise ValueError(f"serve-dir is {config['serve-dir']!r}; it must be an absolute path")
    for key in ("serve-every", "serve-timeout"):
        if not 0 < float(config[key]) < float("inf"):
            raise ValueError(f"{key} is {config[key]}; it must be more than 0 seconds")


def serve(grid: Grid, config: Config) -> None:
    """Serve the nodes of the grid every ``serve-every`` seconds; never returns."""
    check_serving(config)
    run = FinishedRun(str(config["serve-dir"]), str(config["serve-round"]))
    strategy = restore_strategy(run, grid)
    strategy.timeout = float(config["serve-timeout"])
    again: set[int] | None = set() if config["serve-again"] else None
    logged: dict[int, str] = {}  # each client's line of the last turn
    while True:
        lines = serve_once(strategy, run, again)
        for client, line in lines.items():
            # A node that waits, fails or lacks labels says the same in every turn.
            if logged.get(client) != line:
                about = line if client == NO_CLIENT else f"client {client}: {line}"
                logging.getLogger("flwr").info("%s %s", LINE, about)
        logged = lines
        time.sleep(float(config["serve-every"]))


def serve_once(
    strategy: PersonalizedStrategy, run: FinishedRun, again: set[int] | None = None
) -> dict[int, str]:
    """Serve the present nodes that want their model; a line for each of them, by client.

    With `again` every client is served once more: `again` collects those that were."""
    try:
        nodes = strategy.present()
    except NoClientStartsError as error:
        return {NO_CLIENT: f"waiting: {error}"}
    except RuntimeError:  # no node is present
        return {}
    lines: dict[int, str] = {}
    refusals = strategy.roster.refusals
    if refusals:
        count = "1 node" if len(refusals) == 1 else f"{len(refusals)} nodes"
        lines[NO_CLIENT] = f"{count} cannot start: {refusals[0].reason}"
    able = []
    for node in nodes:
        if run.novel or not node.novel:
            able.append(node)
        else:
            lines[node.client] = f"{run.method} has no model without labels"
    wanting, silent = nodes_wanting_model(strategy, able, again)
    for node in silent:
        lines[node.client] = FAILED
    refused = hand_out(strategy, wanting) if wanting else {}
    for node in wanting:
        role = "novel" if node.novel else "training"
        lines[node.client] = refused.get(node.client, f"has its model now ({role})")
        if again is not None and node.client not in refused:
            again.add(node.client)
    return lines


def nodes_wanting_model(
    strategy: PersonalizedStrategy, nodes: list[Node], again: set[int] | None
) -> tuple[list[Node], list[Node]]:
    """The nodes that want their model, and those that gave no answer to the question."""
    first_time: dict[Node, Arrays] = {}
    once_more: dict[Node, Arrays] = {}  # such a node wants its model even if it has it already
    for node in nodes:
        if again is None or node.client in again:
            first_time[node] = {}
        else:
            once_more[node] = {}
    wanting = []
    silent = set(nodes)
    # One configuration holds for all nodes of an exchange, so these are two exchanges.
    for payloads, repeated in ((first_time, False), (once_more, True)):
        if not payloads:
            continue
        for reply in strategy.exchange(WANTS, payloads, {AGAIN: repeated}):
            silent.discard(reply.node)
            if reply.metrics.get(WANTED):
                wanting.append(reply.node)
    return sorted(wanting), sorted(silent)
