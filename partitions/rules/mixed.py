"""Each novel client has another shift, of its classes or of its inputs (ours).

A shift is ``none``; ``alpha-A``, class proportions from Dir(A); ``rotation-D``, inputs rotated by D
degrees counterclockwise; or a corruption. Training clients have all classes alike."""

import math
from collections.abc import Sequence

import numpy as np

from fedapps.common.seeds import seed_of
from partitions.rules.dirichlet import rows_by_alphas
from partitions.rules.partitioner import RowsPartitioner

KEY = "partition.novel-shifts"
NONE = "none"
ALPHA = "alpha-"
ROTATION = "rotation-"


def shifts_by_client(names: Sequence[str], novel: np.ndarray, seed: int) -> list[str]:
    """The shift of each client, ``none`` of training clients. Novel clients get the `names` in
    turn, in a random order, so that each is as frequent as the others."""
    clients = np.flatnonzero(novel)
    order = np.random.default_rng(seed_of(seed, "shifts")).permutation(clients)
    shifts = [NONE] * len(novel)
    for place, client in enumerate(order.tolist()):
        shifts[client] = names[place % len(names)]
    return shifts


def number_of(name: str, prefix: str) -> float | None:
    """The number behind the prefix; None for a name that begins otherwise. Raises ValueError if it
    is no finite number."""
    if not name.startswith(prefix):
        return None
    try:
        number = float(name.removeprefix(prefix))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{KEY} names {name!r}; write a number behind {prefix!r}: {prefix}0.5")
    return number


class MixedPartitioner(RowsPartitioner):
    """Equally many samples for every client, by the proportions of its shift (num_clients,).

    Clients with shifted classes draw first. The others share what is left at random, so that their
    classes are alike."""

    def __init__(self, shifts: Sequence[str], seed: int) -> None:
        super().__init__(len(shifts))
        self._seed = seed
        self._alphas: dict[int, float] = {}  # by client
        for client, name in enumerate(shifts):
            alpha = number_of(name, ALPHA)
            if alpha is None:
                continue
            if alpha <= 0:
                raise ValueError(f"{KEY} names {name!r}; a Dirichlet concentration must be > 0")
            self._alphas[client] = alpha

    def assign(self, labels: np.ndarray) -> list[np.ndarray]:
        """⌊N / n⌋ rows for each client."""
        generator = np.random.default_rng(self._seed)
        size = len(labels) // self.num_partitions
        drawn = rows_by_alphas(labels, list(self._alphas.values()), size, generator)
        rows_of = dict(zip(self._alphas, drawn, strict=True))
        taken = np.concatenate([np.array([], dtype=int), *drawn])
        rest = generator.permutation(np.setdiff1d(np.arange(len(labels)), taken))
        start = 0
        for client in range(self.num_partitions):
            if client not in rows_of:
                rows_of[client] = rest[start : start + size]
                start += size
        return [rows_of[client] for client in range(self.num_partitions)]
