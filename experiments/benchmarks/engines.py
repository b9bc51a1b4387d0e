"""FedAvg on each engine: a round over one of the hand-written loop, and a run's start."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch

import partitions
from clients.core.sgd import batches
from clients.models import build_model
from experiments.benchmarks import hand_written
from experiments.benchmarks.measure import (
    NEVER,
    Row,
    compare,
    round_seconds,
    seconds,
    time_rounds,
    train,
)
from fedapps.settings.config import Config, defaults

ROUNDS, REPEATS = 4, 5
ALL, EVEN, ODD = slice(None), slice(0, None, 2), slice(1, None, 2)  # of the training clients


def protocol() -> Config:
    """FedTTA's protocol on MNIST: 100 clients; half of them train, all in each round."""
    return defaults() | {"dataset": "mnist", "num-clients": 100, "evaluate-every": NEVER}


def loop(config: Config, rounds: int, part: slice = ALL) -> float:
    """Seconds of a round of the hand-written loop: the same steps on the same data."""
    torch.set_num_threads(1)
    federation = partitions.federation(config)
    training = [i for i in range(federation.num_clients) if not federation.novel[i]][part]
    data = [federation.share(i).train[:] for i in training]
    model = build_model(str(config["model"]), federation.info.shape, 10, 0)
    generator = torch.Generator().manual_seed(0)
    steps = int(config["local-steps"])
    size = int(config["batch-size"])
    lr = float(config["lr"])

    def rows(n: int) -> Sequence[torch.Tensor]:
        return batches(n, size, steps=steps, epochs=0, generator=generator)

    def work(count: int) -> None:
        for _ in hand_written.fedavg(model, lambda: data, rows, lr, count):
            pass

    work(1)
    return seconds(lambda: work(rounds)) / rounds


def two_loops(config: Config, rounds: int) -> float:
    """Seconds of a round of two hand-written loops in two processes, half of the clients each."""
    # Both are submitted before a result is waited for, so that they run side by side.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        even = pool.submit(loop, config, rounds, EVEN)
        odd = pool.submit(loop, config, rounds, ODD)
        return max(even.result(), odd.result())


def later_round(config: Config, engine: str) -> float:
    """Seconds of a later round of a run on the engine."""
    reports = train(config | {"rounds": 3 * ROUNDS}, engine)
    return float(np.median([round_seconds(report) for report in reports[ROUNDS:]]))


def in_process() -> list[Row]:
    """A round on the in-process grid over one of the hand-written loop."""
    config = protocol()
    return [
        compare(
            "FedAvg in process / hand-written loop",
            "1.05",
            lambda: time_rounds(config, "fedavg", ROUNDS)[0],
            lambda: loop(config, ROUNDS),
            repeats=REPEATS,
        )
    ]


def side_by_side(engine: str, limit: str) -> list[Row]:
    """A round on two processes of the engine over two hand-written loops side by side."""
    config = protocol()
    return [
        compare(
            f"FedAvg on {engine}, two clients at once / two hand-written loops",
            limit,
            lambda: later_round(config, engine),
            lambda: two_loops(config, ROUNDS),
            repeats=REPEATS,
        )
    ]


def start() -> list[Row]:
    """From the call to the end of the first round on digits, Ray actors over Flower's engine."""
    config = defaults() | {"rounds": 1, "num-clients": 10}
    return [
        compare(
            "a run of one round, Ray actors / Flower's engine",
            "0.50",
            lambda: seconds(lambda: train(config, "ray")),
            lambda: seconds(lambda: train(config, "flower")),
            repeats=REPEATS,
            unit="",
        )
    ]
