"""FedEmbed with many registered users: memory and time, ``python -m experiments.bench_fedembed``.

9 000 users of MNIST are registered, 100 take part in a round; beside them 900, 100 of them. A
round must not cost what is registered, only what takes part. Needs MNIST (FEDAPPS_DATA_DIR)."""

import logging
import multiprocessing
import resource
import time
from multiprocessing.queues import Queue
from typing import Any

import numpy as np

from fedapps.config import Config, defaults

ROUNDS, SAMPLED = 4, 100
Rows = list[tuple[str, float, str, str]]  # what, ratio, bar, in seconds


def protocol(users: int) -> Config:
    """FedEmbed on MNIST with `users` registered, 100 a round; a hundred users are evaluated."""
    return defaults() | {
        "method": "fedembed",
        "dataset": "mnist",
        "partition": "preference",
        "num-clients": users,
        "train-fraction": 1.0,
        "fraction-train": SAMPLED / users,
        "fraction-evaluate": SAMPLED / users,
        "rounds": ROUNDS,
        "evaluate-every": 10**6,
    }


def _measure(users: int, queue: "Queue[Any]") -> None:
    """Seconds of the first round (roster included) and of a later one; peak memory in bytes."""
    import torch

    from clients.arrays import to_record
    from fedapps.clientapp import app, method_model
    from fedapps.config import construct
    from fedapps.engines.grid import InProcessGrid
    from partitions import task
    from strategies.fedembed import FedEmbed

    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    config = protocol(users)
    started, ends = time.perf_counter(), []
    strategy = construct(
        FedEmbed,
        config=config,
        method="fedembed",
        min_available_nodes=users,
        on_round=lambda report: ends.append(time.perf_counter()),
    )
    _, initial = method_model("fedembed", config, task(config))
    shared = to_record({n: a for n, a in initial.items() if n != "embedding"})
    grid = InProcessGrid.simulation(app, config, users)
    from flwr.app import ConfigRecord

    asked = ConfigRecord({"method": "fedembed"})
    strategy.start(grid, shared, num_rounds=ROUNDS, train_config=asked)
    rounds = np.diff([started, *ends])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    queue.put((float(rounds[0]), float(np.median(rounds[1:-1])), peak))


def measured(users: int) -> tuple[float, float, float]:
    """`_measure` in a process of its own, so that memory is that of one federation."""
    context = multiprocessing.get_context("spawn")
    queue: Queue[Any] = context.Queue()
    worker = context.Process(target=_measure, args=(users, queue))
    worker.start()
    result: tuple[float, float, float] = queue.get(timeout=3600)
    worker.join()
    return result


def rows() -> Rows:
    """Time of a round and peak memory, 9 000 registered users over 900."""
    (_, few, small), (first, many, large) = measured(900), measured(9000)
    names = ("FedEmbed round", "its first round, roster included / a later one", "peak memory")
    return [
        (f"{names[0]}, 9 000 users / 900", many / few, "", f"{many:.2f} / {few:.2f}"),
        (f"{names[1]}, 9 000 users", first / many, "", f"{first:.2f} / {many:.2f}"),
        (
            f"{names[2]}, 9 000 / 900",
            large / small,
            "",
            f"{large / 1e6:.0f} / {small / 1e6:.0f} MB",
        ),
    ]


if __name__ == "__main__":
    for row in rows():
        print(*row, sep="  ")
