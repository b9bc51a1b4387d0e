"""The cost of a client's turn besides training: five methods over hand-written loops, by the number
of steps in a turn.

25 of 50 clients train, one thread each. The package and the loop start from the same arrays, take
the same mini-batches, and must agree. In process the clock counts processor time, which depends
less on other load."""

import os
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import count, product

import numpy as np
import torch

import partitions
from clients.core.arrays import from_record, to_tensors
from clients.core.sgd import batches
from clients.models.adaptable import Adaptable
from experiments.benchmarks import engines, hand_written
from experiments.benchmarks.measure import NEVER, Row
from fedapps.building import method_model
from fedapps.clientapp import app
from fedapps.common.seeds import drawing, seed_of
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.serverapp import run
from fedapps.settings.config import Config, defaults, settings
from strategies.maths.hypernetwork import Hypernetwork

STEPS = (1, 5, 20)
BATCH = 32
REPEATS = 5
TURNS = 25  # training clients, and so turns in a round
ROUNDS = {1: 20, 5: 10, 20: 4}  # by steps
LIMITS = {1: "1.50", 5: "1.15", 20: ""}  # of the ratio, by steps
PERSONAL = {"fedavg": (), "fedper": ("head.",)}  # prefixes of names that stay on the clients
METHODS = (*PERSONAL, "scaffold", "pfedhn", "fedtta")
CHECKED = 2  # rounds that must agree, few: FedTTA's second derivatives amplify rounding
DEFAULT_TOLERANCE = 1e-4  # of the difference between the package's arrays and the loop's
TOLERANCE = {"pfedhn": 1e-6}  # a round of pFedHN moves its arrays by 1e-4 only


def protocol(dataset: str, method: str, steps: int) -> Config:
    """The federation of the main job, with short turns."""
    chosen: Config = {
        "dataset": dataset,
        "method": method,
        "local-steps": steps,
        "num-clients": 2 * TURNS,
        "batch-size": BATCH,
        "evaluate-every": NEVER,
        "checkpoint-every": 0,
        "lr": 0.1,
    }
    return defaults() | chosen


def ours(config: Config, rounds: int) -> tuple[float, list[np.ndarray]]:
    """Processor seconds of one of the last `rounds` rounds, and the server's arrays.

    The difference of two runs, which excludes the start and the first round."""
    took = []
    for number in (1, 1 + rounds):
        grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
        started = time.process_time()
        result = run(grid, config | {"rounds": number}, "in-process")
        took.append(time.process_time() - started)
    assert result.arrays is not None
    return (took[1] - took[0]) / rounds, list(from_record(result.arrays).values())


def loop(config: Config, rounds: int) -> tuple[float, list[np.ndarray]]:
    """As `ours`, for the hand-written loop."""
    federation = partitions.federation(config)
    clients = [i for i in range(federation.num_clients) if not federation.novel[i]]
    data = [federation.share(i).train[:] for i in clients]
    seed = int(config["seed"])
    turns = count()

    def rows(n: int) -> Sequence[torch.Tensor]:
        round_number, place = divmod(next(turns), len(clients))
        generator = torch.Generator()
        generator.manual_seed(seed_of(seed, "batches", round_number + 1, clients[place]))
        return batches(n, BATCH, steps=int(config["local-steps"]), generator=generator)

    moments = [time.process_time()]
    for parameters in by_hand(config, clients, data, rows, 1 + rounds):
        moments.append(time.process_time())
        server = [p.detach().numpy().copy() for p in parameters]
    return (moments[-1] - moments[1]) / rounds, server


def by_hand(
    config: Config,
    clients: Sequence[int],
    data: hand_written.Shares,
    rows: hand_written.Batches,
    rounds: int,
) -> Iterator[list[torch.Tensor]]:
    """The hand-written loop of the method, from the arrays that ours starts from."""
    method = str(config["method"])
    seed = int(config["seed"])
    network, initial = method_model(method, config, partitions.federation(config).info)
    model = deepcopy(network)
    values = settings(config, method)
    model.load_state_dict(to_tensors(initial))
    if method == "scaffold":
        return hand_written.scaffold(model, data, rows, values, rounds)
    if method == "fedtta":
        assert isinstance(model, Adaptable)
        return hand_written.fedtta(model, data, rows, values, rounds)
    if method == "pfedhn":
        dim = 1 + len(clients) // 4
        with drawing(seed_of(seed, "hypernetwork")):
            hypernetwork = Hypernetwork({n: a.shape for n, a in initial.items()}, dim)
        v = []
        for client in clients:
            generator = torch.Generator().manual_seed(seed_of(seed, "embedding", client))
            v.append(torch.nn.Parameter(torch.randn(dim, generator=generator)))
        return hand_written.pfedhn(
            model, hypernetwork, v, lambda: range(len(data)), data, rows, values, rounds
        )
    lr = float(values["lr"])
    return hand_written.fedavg(model, lambda: data, rows, lr, rounds, PERSONAL[method])


def in_process(dataset: str, method: str, steps: int) -> Row:
    """One row. Raises RuntimeError if ours and the loop disagree by more than rounding."""
    config = protocol(dataset, method, steps)
    rounds = ROUNDS[steps]
    tolerance = TOLERANCE.get(method, DEFAULT_TOLERANCE)
    _, our_arrays = ours(config, CHECKED)
    _, loop_arrays = loop(config, CHECKED)
    for our_array, loop_array in zip(our_arrays, loop_arrays, strict=True):
        if not np.allclose(our_array, loop_array, rtol=10 * tolerance, atol=tolerance):
            difference = np.abs(our_array - loop_array).max()
            raise RuntimeError(f"{method} and its loop differ by {difference}")
    pairs = [(ours(config, rounds)[0], loop(config, rounds)[0]) for _ in range(REPEATS)]
    return row(f"{method} in process, {dataset}, {steps} steps", pairs, LIMITS[steps])


def on_engine(engine: str, dataset: str, steps: int) -> Row:
    """FedAvg on two processes of the engine, over two loops side by side; wall time."""
    config = protocol(dataset, "fedavg", steps)
    pairs = []
    for _ in range(REPEATS):
        run_seconds = engines.later_round(config, engine)
        loop_seconds = engines.two_loops(config, ROUNDS[steps])
        pairs.append((run_seconds, loop_seconds))
    return row(f"fedavg on {engine}, {dataset}, {steps} steps", pairs, "")


def row(what: str, pairs: Sequence[tuple[float, float]], limit: str) -> Row:
    """A row of the table from pairs (a round of the package, a round of the loop) in seconds: the
    median ratio, and the milliseconds of a turn that are not training."""
    measured = np.array(pairs)
    ratio = float(np.median(measured[:, 0] / measured[:, 1]))
    took, base = np.median(measured, axis=0) / TURNS * 1e3
    extra = float(np.median(measured[:, 0] - measured[:, 1])) / TURNS * 1e3
    return Row(what, ratio, limit, f"{took:.2f} / {base:.2f} ms a turn, {extra:.2f} not training")


def rows() -> list[Row]:
    """All rows; those of MNIST only if FEDAPPS_DATA_DIR is set."""
    datasets = ["digits"]
    if os.environ.get("FEDAPPS_DATA_DIR"):
        datasets.append("mnist")
    cells = list(product(datasets, STEPS))
    table = []
    for method in METHODS:
        table += [in_process(dataset, method, steps) for dataset, steps in cells]
    for engine in ("ray", "flower"):
        table += [on_engine(engine, dataset, steps) for dataset, steps in cells]
    return table
