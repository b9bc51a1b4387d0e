"""Cost of FedTTA's second-order step, as a ratio: ``python -m experiments.bench_fedtta``."""

import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from clients.base import Client
from clients.fedtta import FedTTAClient
from clients.models import build_model
from partitions.datasets import Info
from partitions.shares import Samples, Share

SHAPE, CLASSES, BATCH = (1, 28, 28), 10, 64
STEPS, REPEATS = 100, 15


def clients() -> tuple[Client, Client]:
    """A FedAvg and a FedTTA client: MNIST's shape and network, mini-batches of 64, own training."""
    x = torch.rand(700, *SHAPE, generator=torch.Generator().manual_seed(0))
    data = Samples(x, torch.arange(700) % CLASSES, torch.arange(700), scale=1.0)
    share = Share(data, data, None, data, novel=False)
    options: dict[str, Any] = {"local_steps": STEPS, "batch_size": BATCH}
    base, info = build_model("mlp", SHAPE, CLASSES, 0), Info("mnist", SHAPE, CLASSES, "")
    plain = Client(build_model("mlp", SHAPE, CLASSES, 0), share, **options)
    return plain, FedTTAClient(FedTTAClient.build_network(base, info), share, lr=0.3, **options)


def step_seconds() -> tuple[float, float]:
    """Of a FedTTA step and of an SGD step: processor time on one thread, the best of alternating
    repeats; a busy machine disturbs little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain, meta = clients()
        pairs = [(_seconds(meta), _seconds(plain)) for _ in range(REPEATS)][1:]  # first: warm-up
    finally:
        torch.set_num_threads(threads)
    fedtta, sgd = (min(times) / STEPS for times in zip(*pairs, strict=True))
    return fedtta, sgd


def step_operations() -> tuple[float, float]:
    """Floating-point operations of a FedTTA step and of an SGD step, matrix products alone."""
    counts = []
    for client in reversed(clients()):
        client.load(client.initial)
        with FlopCounterMode(display=False) as counter:
            client.fit_locally({"server-round": 1})
        counts.append(counter.get_total_flops() / STEPS)
    return counts[0], counts[1]


def _seconds(client: Client) -> float:
    client.load(client.initial)
    started = time.process_time()
    client.fit_locally({"server-round": 1})
    return time.process_time() - started


def rows() -> list[tuple[str, float, str, str]]:
    """The benchmark table's rows: what, ratio, bar, in milliseconds or operations."""
    fedtta, sgd = step_seconds()
    took = f"{fedtta * 1e3:.2f} / {sgd * 1e3:.2f} ms of processor time"
    many, few = step_operations()
    counted = f"{many / 1e6:.0f} / {few / 1e6:.0f} million"
    return [
        ("FedTTA step / SGD step of the same network", fedtta / sgd, "3.5", took),
        ("the same, floating-point operations", many / few, "", counted),
    ]


if __name__ == "__main__":
    for row in rows():
        print(*row, sep="  ")
