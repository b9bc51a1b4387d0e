"""The cost of `auto`: its exchanges over the federation's training, a decision over its forward
passes. The federation is that of ``experiments/auto/protocol.toml``, with iid clients."""

import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from clients.methods.auto import AutoClient
from experiments.benchmarks.measure import NEVER, Row, TimedGrid
from fedapps.clientapp import app
from fedapps.serverapp import run
from fedapps.settings.config import Config, defaults

CLIENTS = 150
ROUNDS = 60  # of a whole run
MEASURED_ROUNDS = 2  # a round more costs as much as any other
INPUTS = 200
REPEATS = 9
PASSES = 4  # forward passes of a decision


def protocol(clients: int) -> Config:
    """120 training clients with 320 samples each, 24 in a round."""
    chosen: Config = {
        "method": "auto",
        "dataset": "mnist",
        "model": "convnet-atp",
        "partition": "iid",
        "num-clients": clients,
        "train-fraction": 0.8,
        "fraction-train": 0.2,
        "local-steps": 8,
        "batch-size": 20,
        "lr": 0.1,
        "rounds": MEASURED_ROUNDS,
        "evaluate-every": NEVER,
        "auto.alpha": 0.5,
    }
    return defaults() | chosen


def rows(clients: int = CLIENTS) -> list[Row]:
    """The clients' seconds in all exchanges over those of training; milliseconds of a novel
    client's decision over those of its forward passes."""
    served: list[tuple[AutoClient, Tensor]] = []
    predict = AutoClient.predict

    def keeping(client: AutoClient, x: Tensor) -> Tensor:
        if client.rule and client.share.novel:
            served.append((client, x[:INPUTS]))
        return predict(client, x)

    config = protocol(clients)
    grid = TimedGrid.simulation(app, config, clients)
    with patch.object(AutoClient, "predict", keeping):
        run(grid, config, "in-process")
    training = grid.seconds["train"] * ROUNDS / MEASURED_ROUNDS
    asked = sum(grid.seconds[kind] for kind in AutoClient.exchanges)
    values = f"{asked:.1f} / {training:.1f} s of all clients"
    table = [Row(f"auto, exchanges / training in {ROUNDS} rounds", asked / training, "0.2", values)]
    return [*table, decision(*served[0])]


def decision(client: AutoClient, x: Tensor) -> Row:
    """A decision over its forward passes; the least of repeats in turn."""
    decisions = []
    passes = []
    for _ in range(REPEATS):
        decisions.append(milliseconds(lambda: client.case(x)))
        with torch.no_grad():
            passes.append(milliseconds(lambda: client.model(x)))
    whole = min(decisions)
    forward = PASSES * min(passes)
    values = f"{whole:.0f} / {forward:.0f} ms of processor time, {whole - forward:.0f} beside them"
    return Row(f"auto, decision for {len(x)} inputs / forward passes", whole / forward, "", values)


def milliseconds(work: Callable[[], object]) -> float:
    """Processor time of one call."""
    started = time.process_time()
    work()
    return 1e3 * (time.process_time() - started)
