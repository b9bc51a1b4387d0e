"""Cost of FedTTA's step, of a pFedHN round, and of ODPFL-HN's three exchanges; of strides."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional as F

import partitions
from clients.core.client import Client
from clients.core.protocol import SERVER_ROUND
from clients.core.sgd import batches
from clients.methods.fedtta import FedTTAClient
from clients.models import build_model, networks
from experiments.benchmarks import engines, hand_written
from experiments.benchmarks.measure import NEVER, Row, compare, seconds, time_rounds
from fedapps.settings.config import Config, defaults, settings
from partitions.datasets.loading import Info
from partitions.shares import Samples, Share
from strategies.maths.hypernetwork import Hypernetwork

SHAPE, CLASSES, BATCH = (1, 28, 28), 10, 64
FEDTTA_STEPS, FEDTTA_REPEATS = 100, 15
PFEDHN_CLIENTS, PFEDHN_STEPS = 10, 50
ROUNDS, REPEATS = 4, 5
PARTS = {"query.encode": "encode", "train": "train", "train.backprop": "backprop"}


def fedtta_clients() -> tuple[Client, Client]:
    """A FedTTA client and a FedAvg client, with MNIST's shape and network."""
    x = torch.rand(700, *SHAPE, generator=torch.Generator().manual_seed(0))
    data = Samples(x, torch.arange(700) % CLASSES, torch.arange(700), scale=1.0)
    share = Share(data, data, None, data, novel=False)
    options: dict[str, Any] = {"local_steps": FEDTTA_STEPS, "batch_size": BATCH}
    base = build_model("mlp", SHAPE, CLASSES, 0)
    adaptable = FedTTAClient.build_network(base, Info("mnist", SHAPE, CLASSES, ""))
    fedtta_client = FedTTAClient(adaptable, share, lr=0.3, **options)
    plain = Client(build_model("mlp", SHAPE, CLASSES, 0), share, **options)
    return fedtta_client, plain


def step_seconds(client: Client) -> float:
    """Processor time of a step; a busy machine disturbs it little."""
    client.load(client.initial)
    started = time.process_time()
    client.fit_locally({SERVER_ROUND: 1})
    return (time.process_time() - started) / FEDTTA_STEPS


def step_operations(client: Client) -> float:
    """Floating-point operations of a step, of matrix products only."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    client.load(client.initial)
    with FlopCounterMode(display=False) as counter:
        client.fit_locally({SERVER_ROUND: 1})
    return counter.get_total_flops() / FEDTTA_STEPS


def fedtta() -> list[Row]:
    """A FedTTA step over an SGD step of the same network: the best of alternating repeats."""
    clients = fedtta_clients()
    for client in clients:
        step_seconds(client)  # warm-up
    meta_client, sgd_client = clients
    meta_seconds = []
    sgd_seconds = []
    # In turn, so that a slower phase of the machine meets both.
    for _ in range(FEDTTA_REPEATS):
        meta_seconds.append(step_seconds(meta_client))
        sgd_seconds.append(step_seconds(sgd_client))
    meta = min(meta_seconds)
    sgd = min(sgd_seconds)
    took = f"{meta * 1e3:.2f} / {sgd * 1e3:.2f} ms of processor time"
    meta_operations = step_operations(meta_client)
    sgd_operations = step_operations(sgd_client)
    counted = f"{meta_operations / 1e6:.0f} / {sgd_operations / 1e6:.0f} million"
    return [
        Row("FedTTA step / SGD step of the same network", meta / sgd, "3.5", took),
        Row("the same, floating-point operations", meta_operations / sgd_operations, "", counted),
    ]


def convolution() -> list[Row]:
    """`convnet-atp` on images of one channel, over the same network that leaves the strides of its
    inputs as they are, rows last: a step on 20 of them, and predictions for 700."""
    x = torch.rand(700, *SHAPE)
    y = torch.arange(700) % CLASSES
    model = build_model("convnet-atp", SHAPE, CLASSES, 0)

    def predict() -> float:
        with torch.no_grad():
            return seconds(lambda: model(x)) * 1e3

    def step() -> float:
        return seconds(lambda: F.cross_entropy(model(x[:20]), y[:20]).backward()) * 1e3

    def with_rows_last(work: Callable[[], float]) -> float:
        with patch.object(networks, "channels_last", lambda x: x):
            return work()

    table = []
    for name, work in (("gradients of 20 images", step), ("predictions of 700", predict)):
        what = f"{name}, convnet-atp: channels last / rows last"
        rows_last = partial(with_rows_last, work)
        table.append(compare(what, "", work, rows_last, repeats=25, unit=" ms"))
    return table


def pfedhn_protocol(file: Path) -> Config:
    """Ten training clients, one in a round; `file` gets random images of CIFAR's shape."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (5000, 32, 32, 3), dtype=np.uint8)
    np.savez(file, x=x, y=rng.integers(0, CLASSES, len(x)))
    return defaults() | {
        "dataset": str(file),
        "partition": "iid",
        "model": "lenet",
        "num-clients": PFEDHN_CLIENTS,
        "train-fraction": 1.0,
        "fraction-train": 1 / PFEDHN_CLIENTS,
        "local-steps": PFEDHN_STEPS,
        "batch-size": BATCH,
        "evaluate-every": NEVER,
    }


def pfedhn_loop(config: Config, rounds: int) -> float:
    """Seconds of a round of the hand-written loop."""
    federation = partitions.federation(config)
    data = [federation.share(i).train[:] for i in range(federation.num_clients)]
    generator = torch.Generator().manual_seed(0)
    values = settings(config, "pfedhn")
    dim = 1 + len(data) // 4
    turns = cycle(range(len(data)))

    def rows(n: int) -> Sequence[torch.Tensor]:
        return batches(n, BATCH, steps=PFEDHN_STEPS, epochs=0, generator=generator)

    def work() -> None:
        model = build_model("lenet", federation.info.shape, CLASSES, 0)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        hypernetwork = Hypernetwork(shapes, dim)
        v = [torch.nn.Parameter(torch.randn(dim)) for _ in data]
        loop = hand_written.pfedhn(
            model, hypernetwork, v, lambda: [next(turns)], data, rows, values, rounds
        )
        for _ in loop:
            pass

    return seconds(work) / rounds


def pfedhn() -> list[Row]:
    """A round in process over one of the loop."""
    with tempfile.TemporaryDirectory() as folder:
        config = pfedhn_protocol(Path(folder) / "noise.npz")
        pfedhn_loop(config, 1)  # warm-up
        return [
            compare(
                f"pFedHN, {PFEDHN_STEPS} steps of LeNet / hand-written loop",
                "1.15",
                lambda: time_rounds(config, "pfedhn", ROUNDS)[0],
                lambda: pfedhn_loop(config, ROUNDS),
                repeats=REPEATS,
            )
        ]


def odpfl_hn_protocol() -> Config:
    """FedTTA's protocol on MNIST, a fifth of the training clients in a round."""
    return engines.protocol() | {"fraction-train": 0.2, "odpfl-hn.descriptor-dim": 32}


def odpfl_hn() -> list[Row]:
    """An ODPFL-HN round, and each part of it, over a FedAvg round; medians."""
    config = odpfl_hn_protocol()
    fedavg_rounds = []
    parts: dict[str, list[float]] = defaultdict(list)  # seconds of each repeat
    for _ in range(REPEATS):
        fedavg_rounds.append(time_rounds(config, "fedavg", ROUNDS)[0])
        whole, clients = time_rounds(config, "odpfl-hn", ROUNDS)
        for message_type, name in PARTS.items():
            parts[name].append(clients[message_type])
        parts["server"].append(whole - sum(clients[message_type] for message_type in PARTS))
    base = float(np.median(fedavg_rounds))
    medians = {name: float(np.median(repeats)) for name, repeats in parts.items()}
    table = []
    for name, took in {"round": sum(medians.values()), **medians}.items():
        values = f"{took:.2f} / {base:.2f}"
        table.append(Row(f"ODPFL-HN {name} / FedAvg round", took / base, "", values))
    return table
