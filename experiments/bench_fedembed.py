"""FedEmbed with many registered users: memory and time, ``python -m experiments.bench_fedembed``.

9 000 users of MNIST are registered, 100 take part in a round; beside them 900, 100 of them. A
round must not cost what is registered, only what takes part. Needs MNIST (FEDAPPS_DATA_DIR)."""

import logging
import resource
import time

import numpy as np

from experiments.bench_clients import apart
from fedapps.settings.config import Config, defaults

ROUNDS, SAMPLED = 4, 100
REGISTERED = (900, 9000)
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


def _measure(config: Config) -> tuple[float, float, float]:
    """Seconds of the first round (roster included) and of a later one; peak memory in bytes."""
    import torch

    from clients.arrays import to_record
    from fedapps.clientapp import app
    from fedapps.engines.grid import InProcessGrid
    from fedapps.node.building import method_model
    from fedapps.settings.config import construct
    from partitions import task
    from strategies.fedembed import FedEmbed

    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    users = int(config["num-clients"])
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
    strategy.start(grid, shared, num_rounds=int(config["rounds"]), train_config=asked)
    rounds = np.diff([started, *ends])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return float(rounds[0]), float(np.median(rounds[1:-1])), peak


def measured(users: int) -> tuple[float, float, float]:
    """`_measure` in a process of its own, so that memory is that of one federation."""
    return apart(_measure, protocol(users))


def rows() -> Rows:
    """Time of a round and peak memory, most users registered over fewest."""
    (_, few, small), (first, many, large) = map(measured, REGISTERED)
    fewest, most = REGISTERED
    names = ("FedEmbed round", "its first round, roster included / a later one", "peak memory")
    return [
        (f"{names[0]}, {most} users / {fewest}", many / few, "", f"{many:.2f} / {few:.2f}"),
        (f"{names[1]}, {most} users", first / many, "", f"{first:.2f} / {many:.2f}"),
        (
            f"{names[2]}, {most} / {fewest}",
            large / small,
            "",
            f"{large / 1e6:.0f} / {small / 1e6:.0f} MB",
        ),
    ]


if __name__ == "__main__":
    for row in rows():
        print(*row, sep="  ")
