"""pFedHN over its loop written by hand: ``python -m experiments.benchmark pfedhn``.

LeNet on images of CIFAR's shape, 50 local steps of one client a round, one thread."""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import partitions
from clients.models import build_model
from experiments.bench_odpfl import rounds
from fedapps.settings.config import Config, defaults
from strategies.hypernetwork import Hypernetwork

CLIENTS, STEPS, BATCH, ROUNDS, REPEATS = 10, 50, 64, 6, 5
Rows = list[tuple[str, float, str, str]]  # what, ratio, bar, in seconds


def protocol(file: Path) -> Config:
    """Ten clients that train, one of them a round, with the defaults of the method."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (5000, 32, 32, 3), dtype=np.uint8)
    np.savez(file, x=x, y=rng.integers(0, 10, len(x)))
    return defaults() | {
        "dataset": str(file),
        "partition": "iid",
        "model": "lenet",
        "num-clients": CLIENTS,
        "train-fraction": 1.0,
        "fraction-train": 1 / CLIENTS,
        "local-steps": STEPS,
        "batch-size": BATCH,
        "evaluate-every": 10**6,
    }


def by_hand(config: Config, count: int) -> None:
    """The same rounds as one writes them: φ and v generate θ, SGD moves it, Δθ goes back."""
    federation = partitions.federation(config)
    data = [federation.share(i).train[:] for i in range(CLIENTS)]
    model = build_model("lenet", federation.info.shape, 10, 0)
    parameters = list(model.parameters())
    shapes = {name: p.shape for name, p in model.named_parameters()}
    dim = 1 + CLIENTS // 4
    hypernetwork, embeddings = Hypernetwork(shapes, dim), torch.nn.Embedding(CLIENTS, dim)
    learnt = [*hypernetwork.parameters(), *embeddings.parameters()]
    server = torch.optim.SGD(learnt, 0.01, momentum=0.9, weight_decay=1e-3)
    for number in range(count):
        client = number % CLIENTS
        x, y = data[client]
        generated = [a[0] for a in hypernetwork(embeddings(torch.tensor([client]))).values()]
        with torch.no_grad():
            for parameter, value in zip(parameters, generated, strict=True):
                parameter.copy_(value)
        local = torch.optim.SGD(parameters, 0.005, momentum=0.9, weight_decay=5e-5)
        for _ in range(STEPS):
            batch = torch.randint(len(y), (BATCH,))
            local.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            local.step()
        difference = [g.detach() - p.detach() for g, p in zip(generated, parameters, strict=True)]
        server.zero_grad()
        torch.autograd.backward(generated, difference)
        clip_grad_norm_(learnt, 50)
        server.step()


def rows() -> Rows:
    """A round in process over one of the loop; medians of alternating runs."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        config = protocol(Path(folder) / "noise.npz")
        by_hand(config, 1)
        for _ in range(REPEATS):
            ours = rounds(config, "pfedhn", ROUNDS)[0]
            started = time.perf_counter()
            by_hand(config, ROUNDS)
            pairs.append((ours / ROUNDS, (time.perf_counter() - started) / ROUNDS))
    ratio = float(np.median([ours / loop for ours, loop in pairs]))
    ours, loop = np.median(np.array(pairs), axis=0)
    what = f"pFedHN, {STEPS} steps of LeNet / hand-written loop"
    return [(what, ratio, "1.15", f"{ours:.2f} / {loop:.2f} a round")]
