"""Cost of FedTTA's second-order step, as a ratio: ``python -m experiments.bench_fedtta``."""

import time
from typing import Any

import torch

from clients.base import Client
from clients.fedtta import FedTTAClient
from clients.models import build_model
from partitions.datasets import Info
from partitions.shares import Samples, Share

SHAPE, CLASSES, BATCH = (1, 28, 28), 10, 64
STEPS, REPEATS = 100, 15


def step_ratio() -> tuple[float, float, float]:
    """Seconds of a FedTTA step over those of an SGD step of the same network, and both.

    MNIST's shape and network, mini-batches of 64, one thread, each client's own local training;
    processor time, the best of alternating repeats: a busy machine disturbs little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.rand(700, *SHAPE, generator=torch.Generator().manual_seed(0))
        data = Samples(x, torch.arange(700) % CLASSES, torch.arange(700), scale=1.0)
        share = Share(data, data, None, data, novel=False)
        options: dict[str, Any] = {"local_steps": STEPS, "batch_size": BATCH}
        base, info = build_model("mlp", SHAPE, CLASSES, 0), Info("mnist", SHAPE, CLASSES, "")
        plain = Client(build_model("mlp", SHAPE, CLASSES, 0), share, **options)
        meta = FedTTAClient(FedTTAClient.build(base, info), share, lr=0.3, **options)
        pairs = [(_seconds(plain), _seconds(meta)) for _ in range(REPEATS)]
    finally:
        torch.set_num_threads(threads)
    sgd, fedtta = (min(times) / STEPS for times in zip(*pairs[1:], strict=True))  # first: warm-up
    return fedtta / sgd, fedtta, sgd


def _seconds(client: Client) -> float:
    client.load(client.initial)
    started = time.process_time()
    client.fit_locally({"server-round": 1})
    return time.process_time() - started


def rows() -> list[tuple[str, float, str, str]]:
    """The benchmark table's row: what, ratio, bar, milliseconds."""
    ratio, fedtta, sgd = step_ratio()
    took = f"{fedtta * 1e3:.2f} / {sgd * 1e3:.2f} ms of processor time"
    return [("FedTTA step / SGD step of the same network", ratio, "3.5", took)]


if __name__ == "__main__":
    for row in rows():
        print(*row, sep="  ")
