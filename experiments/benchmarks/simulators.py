"""FedAvg in other simulators, set up as their documentation says.

All do the same work: MNIST in shards, ten of 100 clients train in a round, one pass over
their shuffled samples, SGD, no evaluation, one thread. The other simulators are no dependencies of
this package: ``python -m experiments.benchmarks.simulators NAME`` measures one of them in its own
environment and prints the seconds of every round as JSON. `rows` starts it for each simulator."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import partitions
from clients.models import build_model
from experiments.benchmarks import hand_written
from experiments.benchmarks.measure import NEVER, Row, round_seconds, train
from fedapps.settings.config import Config, defaults

CLIENTS = 100
SAMPLED = 10
LR = 0.1
ROUNDS = {"mlp": 12, "convnet": 3}  # a round of the MLP takes only a tenth of a second
REPEATS = 5
TIMEOUT = 1800  # seconds
PACKAGES = {"fluke": "fluke-fl==0.8.1", "FedLab": "fedlab==1.3.0", "pfl-research": "pfl==0.6.0"}
WORKS = (("mlp", 64), ("mlp", 10), ("convnet", 64), ("convnet", 10))  # networks, batch sizes
Work = tuple[str, int]
Shares = list[tuple[Tensor, Tensor]]  # x (n, 1, 28, 28), y (n,) of every client


def protocol(work: Work) -> Config:
    """The work as a configuration of this package."""
    model, batch = work
    return defaults() | {
        "method": "fedavg",
        "dataset": "mnist",
        "partition": "shards",
        "num-clients": CLIENTS,
        "train-fraction": 1.0,
        "fraction-train": SAMPLED / CLIENTS,
        "rounds": ROUNDS[model],
        "local-epochs": 1,
        "batch-size": batch,
        "lr": LR,
        "model": model,
        "evaluate-every": NEVER,
        "checkpoint-every": 0,
    }


def network(work: Work) -> nn.Module:
    """The network that is trained, freshly initialised."""
    return build_model(work[0], (1, 28, 28), 10, 0)


def loop(work: Work, shares: Shares) -> list[float]:
    """FedAvg by hand."""
    clock = [time.perf_counter()]
    for _ in hand_written.fedavg(
        network(work),
        lambda: random.sample(shares, SAMPLED),
        lambda n: torch.randperm(n).split(work[1]),
        LR,
        ROUNDS[work[0]],
    ):
        clock.append(time.perf_counter())
    return np.diff(clock).tolist()


def fedapps(engine: str) -> Callable[[Work, Shares], list[float]]:
    """This package on one of its engines, by its own clock."""
    return lambda work, shares: [round_seconds(report) for report in train(protocol(work), engine)]


def flower(work: Work, shares: Shares) -> list[float]:
    """Flower's FedAvg on Flower's simulation engine; data in memory, a DataLoader a client."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, clock = ClientApp(), ServerApp(), []

    @client.train()
    def fit(message: Message, context: Any) -> Message:
        torch.set_num_threads(1)
        number = int(context.node_config["partition-id"])
        x, y = partitions.federation(protocol(work)).share(number).train[:]
        model = network(work)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for inputs, labels in DataLoader(TensorDataset(x, y), work[1], shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    class Timed(FedAvg):
        def configure_train(self, *arguments: Any) -> Any:
            clock.append(time.perf_counter())
            return super().configure_train(*arguments)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Timed(
            fraction_train=SAMPLED / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS
        )
        arrays = ArrayRecord(network(work).state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS[work[0]] + 1)

    run_simulation(
        server,
        client,
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return np.diff(clock).tolist()


def fluke(work: Work, shares: Shares) -> list[float]:
    """fluke's FedAVG: FastDataLoader a client, no evaluation."""
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import FastDataLoader
    from fluke.utils import FederationObserver

    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(x, y, num_labels=10, batch_size=work[1], shuffle=True) for x, y in shares
    ]
    splitter = SimpleNamespace(assign=lambda n, batch: ((loaders, [None] * n), None))
    client = DDict(
        batch_size=work[1],
        local_epochs=1,
        loss=nn.CrossEntropyLoss,
        optimizer=DDict(name="SGD", lr=LR),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1.0),
    )
    hyper = DDict(client=client, server=DDict(), model=network(work))
    algorithm = FedAVG(CLIENTS, splitter, hyper)
    clock: list[float] = []

    class Clock(FederationObserver):
        def start_round(self, round: int, global_model: Any) -> None:
            clock.append(time.perf_counter())

        def end_round(self, round: int) -> None:
            clock.append(time.perf_counter())

    algorithm.set_callbacks([Clock()])
    algorithm.run(ROUNDS[work[0]], SAMPLED / CLIENTS, finalize=False)
    return [end - start for start, end in zip(clock[::2], clock[1::2], strict=True)]


def fedlab(work: Work, shares: Shares) -> list[float]:
    """FedLab's standalone pipeline: its serial trainer, a DataLoader a client."""
    from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
    from fedlab.core.standalone import StandalonePipeline

    def loader(client: int, batch: int) -> DataLoader:
        return DataLoader(TensorDataset(*shares[client]), batch, shuffle=True)

    clock: list[float] = []

    class Timed(StandalonePipeline):
        def evaluate(self) -> None:
            clock.append(time.perf_counter())

    trainer = FedAvgSerialClientTrainer(network(work), CLIENTS)
    trainer.setup_dataset(SimpleNamespace(get_dataloader=loader))
    trainer.setup_optim(1, work[1], LR)
    clock.append(time.perf_counter())
    Timed(FedAvgServerHandler(network(work), ROUNDS[work[0]], SAMPLED / CLIENTS), trainer).main()
    return np.diff(clock).tolist()


def pfl(work: Work, shares: Shares) -> list[float]:
    """pfl-research: its FederatedAveraging on its simulated backend. Its batches are slices of a
    user's tensors, so these are shuffled when a user is sampled."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(work)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            return F.cross_entropy(self(x), y)

        def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:
            return {}

    clock: list[float] = [time.perf_counter()]

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *arguments: Any, **named: Any) -> tuple[bool, Metrics]:
            clock.append(time.perf_counter())
            return False, Metrics()

    def dataset_of(user: int) -> Any:
        order = torch.randperm(len(shares[user][1]))
        return Dataset(raw_data=[part[order] for part in shares[user]], user_id=user)

    users = list(range(CLIENTS))
    dataset = FederatedDataset(dataset_of, get_user_sampler("random", users))
    net = Net()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(ROUNDS[work[0]], 10**6, SAMPLED, 0),
        SimulatedBackend(dataset, dataset),
        model,
        NNTrainHyperParams(local_batch_size=work[1], local_num_epochs=1, local_learning_rate=LR),
        callbacks=[Clock()],
    )
    return np.diff(clock).tolist()


SIMULATORS: dict[str, Callable[[Work, Shares], list[float]]] = {
    "hand-written loop": loop,
    "fedapps, in process": fedapps("in-process"),
    "fedapps, ray": fedapps("ray"),
    "fedapps, flower": fedapps("flower"),
    "Flower": flower,
    "fluke": fluke,
    "FedLab": fedlab,
    "pfl-research": pfl,
}


def data(work: Work) -> Shares:
    """Every client's training samples."""
    federation = partitions.federation(protocol(work))
    return [federation.share(i).train[:] for i in range(CLIENTS)]


def measure(name: str) -> np.ndarray:
    """Seconds of a round (works,) without the first one, in a process of its own."""
    package = PACKAGES.get(name)
    command = ["uv", "run", "-q", "--with", package, "python"] if package else [sys.executable]
    done = subprocess.run(
        [*command, "-m", "experiments.benchmarks.simulators", name],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    seconds = json.loads(done.stdout.strip().splitlines()[-1])
    return np.array([np.mean(rounds[1:]) for rounds in seconds])


def rows() -> list[Row]:
    """Every simulator's round over that of the hand-written loop; medians of repeats in turn."""
    repeats: dict[str, list[np.ndarray]] = {name: [] for name in SIMULATORS}
    for _ in range(REPEATS):
        for name in SIMULATORS:
            repeats[name].append(measure(name))
    measured = {name: np.array(runs) for name, runs in repeats.items()}  # (repeats, works)
    table = []
    for number, (model, batch) in enumerate(WORKS):
        base = measured["hand-written loop"][:, number]
        for name, all_seconds in measured.items():
            seconds = all_seconds[:, number]
            ratio = float(np.median(seconds / base))
            values = f"{np.median(seconds):.2f} / {np.median(base):.2f} a round"
            table.append(Row(f"{model}, batches of {batch}: {name}", ratio, "", values))
    return table


def main(name: str) -> None:
    """Measure one simulator on every work, in this process."""
    if name not in SIMULATORS:
        raise SystemExit(f"unknown {name!r}; known: {', '.join(SIMULATORS)}")
    torch.set_num_threads(1)
    print(json.dumps([SIMULATORS[name](work, data(work)) for work in WORKS]))


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
