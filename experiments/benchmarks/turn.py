"""What a client's turn costs beside training: five methods over their loops, by steps of a turn.

25 of 50 clients train, one thread each. Ours and the loop start from the same arrays, take the same
mini-batches in turn, and must agree. In process the clock counts processor time, which other work
disturbs less."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import count
from statistics import median

import numpy as np
import torch

import partitions
from clients.core.arrays import from_record, to_tensors
from clients.core.sgd import batches
from clients.models.adaptable import Adaptable
from experiments.benchmarks import engines, hand_written
from experiments.benchmarks.measure import NEVER, Row
from fedapps.clientapp import app
from fedapps.common.seeds import drawing, seed_of
from fedapps.engines.in_process_grid import InProcessGrid
from fedapps.node.building import method_model
from fedapps.serverapp import run
from fedapps.settings.config import Config, defaults, settings
from strategies.maths.hypernetwork import Hypernetwork

STEPS, BATCH, REPEATS = (1, 5, 20), 32, 5
ROUNDS = {1: 20, 5: 10, 20: 4}
LIMITS = {1: "1.50", 5: "1.15", 20: ""}
PERSONAL = {"fedavg": (), "fedper": ("head.",)}  # names that stay on the clients
METHODS = (*PERSONAL, "scaffold", "pfedhn", "fedtta")
CHECKED = 2  # rounds after the first that must agree; FedTTA's second derivatives amplify rounding
TOLERANCE = {"pfedhn": 1e-6}  # of disagreement; else 1e-4. A round moves its arrays by 1e-4


def protocol(dataset: str, method: str, steps: int) -> Config:
    """The federation of the main job, with short turns."""
    chosen: Config = {"dataset": dataset, "method": method, "local-steps": steps}
    rest: Config = {"num-clients": 50, "batch-size": BATCH, "evaluate-every": NEVER}
    return defaults() | chosen | rest | {"checkpoint-every": 0, "lr": 0.1}


def ours(config: Config, rounds: int) -> tuple[float, list[np.ndarray]]:
    """Processor seconds of one of the last `rounds` rounds, and the server's arrays."""
    took = []
    for number in (1, 1 + rounds):
        grid = InProcessGrid.simulation(app, config, int(config["num-clients"]))
        started = time.process_time()
        result = run(grid, config | {"rounds": number}, "in-process")
        took.append(time.process_time() - started)
    assert result.arrays is not None
    return (took[1] - took[0]) / rounds, list(from_record(result.arrays).values())


def loop(config: Config, rounds: int) -> tuple[float, list[np.ndarray]]:
    """The same of the hand-written loop, which also takes the first round."""
    federation = partitions.federation(config)
    clients = [i for i in range(federation.num_clients) if not federation.novel[i]]
    data = [federation.share(i).train[:] for i in clients]
    seed, turns = int(config["seed"]), count()

    def rows(n: int) -> Sequence[torch.Tensor]:
        number, client = divmod(next(turns), len(clients))
        generator = torch.Generator()
        generator.manual_seed(seed_of(seed, "batches", number + 1, clients[client]))
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
    method, seed = str(config["method"]), int(config["seed"])
    network, initial = method_model(method, config, partitions.federation(config).info)
    model, values = deepcopy(network), settings(config, method)
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
        generators = [torch.Generator() for _ in clients]
        for generator, client in zip(generators, clients, strict=True):
            generator.manual_seed(seed_of(seed, "embedding", client))
        v = [torch.nn.Parameter(torch.randn(dim, generator=g)) for g in generators]
        return hand_written.pfedhn(
            model, hypernetwork, v, lambda: range(len(data)), data, rows, values, rounds
        )
    lr = float(values["lr"])
    return hand_written.fedavg(model, lambda: data, rows, lr, rounds, PERSONAL[method])


def in_process(dataset: str, method: str, steps: int) -> Row:
    """One row. Raises RuntimeError if ours and the loop disagree by more than rounding."""
    config, rounds = protocol(dataset, method, steps), ROUNDS[steps]
    least = TOLERANCE.get(method, 1e-4)
    for one, other in zip(ours(config, CHECKED)[1], loop(config, CHECKED)[1], strict=True):
        if not np.allclose(one, other, rtol=10 * least, atol=least):
            raise RuntimeError(f"{method} and its loop differ by {np.abs(one - other).max()}")
    pairs = [(ours(config, rounds)[0], loop(config, rounds)[0]) for _ in range(REPEATS)]
    return row(f"{method} in process, {dataset}, {steps} steps", pairs, LIMITS[steps])


def on_engine(engine: str, dataset: str, steps: int) -> Row:
    """FedAvg on two processes of the engine, over two loops side by side; wall time."""
    config = protocol(dataset, "fedavg", steps)
    pairs = [
        (engines.later_round(config, engine), engines.two_loops(config, ROUNDS[steps]))
        for _ in range(REPEATS)
    ]
    return row(f"fedavg on {engine}, {dataset}, {steps} steps", pairs, "")


def row(what: str, pairs: Sequence[tuple[float, float]], limit: str) -> Row:
    """The median ratio, and milliseconds of a turn that are not training."""
    turns = 25
    extra = median(one - other for one, other in pairs) / turns * 1e3
    took, base = (median(pair[i] for pair in pairs) / turns * 1e3 for i in (0, 1))
    ratio = median(one / other for one, other in pairs)
    return Row(what, ratio, limit, f"{took:.2f} / {base:.2f} ms a turn, {extra:.2f} not training")


def rows() -> list[Row]:
    """All rows; those of MNIST if it is below FEDAPPS_DATA_DIR."""
    datasets = ["digits", "mnist"] if os.environ.get("FEDAPPS_DATA_DIR") else ["digits"]
    measures: list[Callable[[str, int], Row]] = [
        *(lambda d, s, m=m: in_process(d, m, s) for m in METHODS),
        *(lambda d, s, e=e: on_engine(e, d, s) for e in ("ray", "flower")),
    ]
    return [measure(d, s) for measure in measures for d in datasets for s in STEPS]
