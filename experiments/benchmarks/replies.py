"""The server's work on thousands of replies, over `numpy.add` on the same arrays.

There are `DISTINCT` different replies, more than a processor's cache holds; they are repeated. The
round is all of FedAvg's work on them: read each reply from its message, check names, shapes and
numbers, measure and limit the change, and average."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from clients.core.arrays import Arrays, filled, to_record
from clients.core.protocol import CAPABILITIES, NUM_EXAMPLES
from experiments.benchmarks.measure import Row, compare
from fedapps.engines.in_process_grid import LocalGrid, Simulated, with_id
from strategies.core.aggregation import weighted_mean
from strategies.methods.fedavg import FedAvg

REPLIES = 10_000
REPEATS = 3
DISTINCT = 256
SHAPES: dict[str, tuple[int, ...]] = {
    "0.weight": (200, 784),
    "2.weight": (200, 216),
}  # 200 000 weights, 0.8 MB


def made(count: int, shapes: Mapping[str, tuple[int, ...]]) -> list[Arrays]:
    """Random float32 arrays of `count` clients."""
    draws = np.random.default_rng(0)
    clients: list[Arrays] = [{} for _ in range(count)]
    for name, shape in shapes.items():
        stack = draws.standard_normal((count, *shape), np.float32)
        for client, array in zip(clients, stack, strict=True):
            client[name] = array
    return clients


def added(replies: Sequence[Arrays]) -> Arrays:
    """Their sum by `numpy.add`, in place."""
    total = {name: np.zeros_like(array) for name, array in replies[0].items()}
    for reply in replies:
        for name, array in reply.items():
            np.add(total[name], array, out=total[name])
    return total


class Stored(LocalGrid):
    """A grid with a node for each of `weights`; node i trains to reply i modulo their number."""

    def __init__(self, replies: Sequence[Arrays], weights: Sequence[int]) -> None:
        super().__init__(Simulated(len(weights)))
        self._arrays = [to_record(reply) for reply in replies]
        self._metrics = [MetricRecord({NUM_EXAMPLES: weight}) for weight in weights]
        self.started = 0.0  # processor time before the replies of a round

    def answer(self, messages: Sequence[Message], timeout: float | None) -> Iterator[Message]:
        """A reply to each message."""
        self.started = time.process_time()
        for message in messages:
            client = message.metadata.dst_node_id - 1
            if message.metadata.message_type == "query":
                content: dict[str, Any] = {
                    "config": ConfigRecord({"client": client, CAPABILITIES: ""})
                }
            else:
                arrays = self._arrays[client % len(self._arrays)]
                content = {"arrays": arrays, "metrics": self._metrics[client]}
            yield with_id(Message(filled(RecordDict(), content), reply_to=message))


def round_of(grid: Stored, start: Arrays) -> tuple[float, Arrays]:
    """Processor seconds from the first reply to the new model, and that model."""
    ended = []
    strategy = FedAvg(fraction_evaluate=0.0, on_round=lambda _: ended.append(time.process_time()))
    strategy.start(grid, to_record(start), num_rounds=1)
    return ended[0] - grid.started, strategy.arrays


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor time of one call; a busy machine disturbs it little."""
    started = time.process_time()
    work()
    return time.process_time() - started


def rows(count: int = REPLIES) -> list[Row]:
    """The mean, and a round from the replies to the model."""
    distinct = made(min(count, DISTINCT), SHAPES)
    replies = [distinct[i % len(distinct)] for i in range(count)]
    start = {name: np.zeros_like(array) for name, array in distinct[0].items()}
    weights = np.random.default_rng(1).integers(1, 99, count).tolist()
    grid = Stored(distinct, weights)

    def row(what: str, limit: str, work: Callable[[], float]) -> Row:
        def by_numpy() -> float:
            return processor_seconds(lambda: added(replies))

        what = f"{what} of {count} replies / numpy.add"
        return compare(what, limit, work, by_numpy, repeats=REPEATS, unit="")

    return [
        row("mean", "2.00", lambda: processor_seconds(lambda: weighted_mean(replies, weights))),
        row("round", "", lambda: round_of(grid, start)[0]),
    ]
