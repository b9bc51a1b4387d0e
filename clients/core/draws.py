"""Mini-batches of local training by a user's sampler, in the place of passes over all samples."""

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """`sampler` gives positions of samples, or lists of them `in_batches`, anew in each pass.

    A pass ends by itself, or after ``len(sampler)`` entries."""

    sampler: Iterable[Any]
    in_batches: bool

    @property
    def name(self) -> str:
        """The sampler's class."""
        return type(self.sampler).__name__

    def batches(
        self, n: int, batch_size: int, *, steps: int = 0, epochs: int = 0, short: bool = False
    ) -> Sequence[Tensor]:
        """The positions (m,) of each mini-batch, of `epochs` > 0 passes or of `steps` mini-batches,
        as `clients.core.sgd.batches` for `n` samples. Raises ValueError for other positions."""
        if epochs:
            steps = 0  # as many as the passes have
        if self.in_batches:
            rows = self._in_batches(steps, epochs)
        else:
            rows = self._by_size(batch_size, steps, epochs, short)
        for row in rows:
            if not len(row) or int(row.min()) < 0 or int(row.max()) >= n:
                raise ValueError(
                    f"{self.name} drew the samples {row.tolist()!r:.80}; it must draw one or more "
                    f"of 0 … {n - 1}"
                )
        return rows

    def _in_batches(self, steps: int, epochs: int) -> list[Tensor]:
        rows: list[Tensor] = []
        passes = 0
        while passes < epochs or len(rows) < steps:
            new = [torch.as_tensor(batch) for batch in self._pass(epochs, steps - len(rows))]
            rows += new
            passes += 1
        return rows if epochs else rows[:steps]

    def _by_size(self, batch_size: int, steps: int, epochs: int, short: bool) -> list[Tensor]:
        wanted = steps * batch_size
        if epochs or short:
            rows: list[Tensor] = []
            passes = 0
            while passes < epochs or len(rows) < steps:
                rows += torch.as_tensor(self._pass(epochs, wanted)).split(batch_size)
                passes += 1
            return rows if epochs else rows[:steps]
        order: list[int] = []
        size = batch_size
        while len(order) < steps * size:
            drawn = self._pass(epochs, wanted)
            size = min(size, len(drawn))  # a pass may be shorter than a mini-batch
            order += drawn
        if not steps:
            return []
        return list(torch.as_tensor(order)[: steps * size].split(size))

    def _pass(self, epochs: int, wanted: int) -> list[Any]:
        """The entries of one pass; of a sampler without a length those that are `wanted`."""
        limit = wanted
        if isinstance(self.sampler, Sized):
            limit = len(self.sampler)
        elif epochs:
            raise ValueError(
                f"{self.name} has no length, so it is unclear where an epoch ends; give it "
                "__len__, or set local_steps"
            )
        drawn = list(islice(iter(self.sampler), limit))
        if not drawn:
            raise ValueError(f"{self.name} draws no sample")
        return drawn
