"""The server's part: thousands of replies, beside `numpy.add` over the same arrays."""

from collections.abc import Callable, Sequence

import numpy as np

from clients.arrays import Arrays
from experiments.benchmarks.measure import Row, compare, seconds
from strategies.fedavg import weighted_mean
from strategies.limits import group_norms
from strategies.replies import finite

REPLIES, REPEATS = 10_000, 3
SHAPES: dict[str, tuple[int, ...]] = {
    "0.weight": (200, 784),
    "2.weight": (200, 216),
}  # 200 000 weights, 8 GB in all


def made(count: int, shapes: dict[str, tuple[int, ...]]) -> list[Arrays]:
    """Random float32 arrays of `count` clients."""
    draws = np.random.default_rng(0)
    stacks = {n: draws.standard_normal((count, *s), np.float32) for n, s in shapes.items()}
    return [{name: stack[i] for name, stack in stacks.items()} for i in range(count)]


def added(replies: Sequence[Arrays]) -> Arrays:
    """Their sum by `numpy.add`, in place."""
    total = {name: np.zeros_like(array) for name, array in replies[0].items()}
    for reply in replies:
        for name, array in reply.items():
            np.add(total[name], array, out=total[name])
    return total


def checked_mean(replies: Sequence[Arrays], start: Arrays, weights: Sequence[float]) -> Arrays:
    """The mean, once every array is finite and the norm of every change is known."""
    for reply in replies:
        if not finite(reply):
            raise ValueError("an array is not finite")
        group_norms(reply, start)
    return weighted_mean(replies, weights)


def rows(count: int = REPLIES) -> list[Row]:
    """The mean, and the mean with the checks of replies."""
    replies = made(count, SHAPES)
    start = {name: np.zeros_like(array) for name, array in replies[0].items()}
    weights = np.random.default_rng(1).integers(1, 99, count).tolist()

    def row(what: str, limit: str, work: Callable[[], object]) -> Row:
        def by_numpy() -> float:
            return seconds(lambda: added(replies))

        what = f"{what} of {count} replies / numpy.add"
        return compare(what, limit, lambda: seconds(work), by_numpy, repeats=REPEATS, unit="")

    return [
        row("mean", "2.00", lambda: weighted_mean(replies, weights)),
        row("checks and mean", "", lambda: checked_mean(replies, start, weights)),
    ]
