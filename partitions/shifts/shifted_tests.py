"""Other test samples for training clients: the five test sets of FedTHE (Jiang and Lin, ICLR 2023).

As many samples replace a client's test samples, and nothing else changes. "corruption": the same
images, each under a corruption of its own at severity 5. "out-of-client": test samples of other
training clients. "natural": images of a dataset with the same classes, with the same labels.
"mixture": equal parts of these, and of unchanged ones. A client has one angle of motion and one
fog. Departs from the authors' code: a mixture has as many samples as the others."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Generator, Tensor

from fedapps.common.seeds import seed_of
from partitions.datasets.loading import Dataset, Info, configured
from partitions.rules.registry import Config
from partitions.shifts.corruptions import CORRUPTIONS, as_stored, corrupted
from partitions.shifts.translation import translated

Labeled = tuple[Tensor, Tensor]  # inputs as stored (n, *shape) and labels (n,)
NATURAL = {"mnist": "digits"}  # datasets with a natural shift: the one that has it
OURS = ("speckle-noise", "blur", "inversion", "background")  # not of the 15 of the benchmark
SEVERITY = 5


class ShiftedTests:
    """Test samples of the `kind` for clients of a dataset. `others` gives the test samples of the
    other training clients. Raises ValueError for a dataset that has no such shift."""

    def __init__(
        self, config: Config, dataset: Dataset, seed: int, others: Callable[[int], Labeled]
    ) -> None:
        kind, info = str(config["partition.test-shift"]), dataset.info
        self._info, self._seed, self._others = info, seed, others
        other = NATURAL.get(info.name)
        if kind == "natural" and other is None:
            raise ValueError(
                f"partition.test-shift is 'natural', but {info.name} has no natural shift; "
                f"datasets that have: {', '.join(NATURAL)}"
            )
        kinds = ["none", "corruption", "out-of-client", *(["natural"] if other else [])]
        self._kinds = kinds if kind == "mixture" else [kind]
        self._corruptions = corruptions_for(info) if "corruption" in self._kinds else []
        if "natural" in self._kinds:
            self._natural = translated(configured({**config, "dataset": other or ""}), dataset)

    def __call__(self, client: int, x: Tensor, y: Tensor) -> Labeled:
        """What replaces the client's test samples x and y."""
        source = np.random.default_rng(seed_of(self._seed, "shifted tests", client))
        rows = source.permutation(len(y)) if len(self._kinds) > 1 else np.arange(len(y))
        y = y.clone()
        for kind, some in zip(self._kinds, np.array_split(rows, len(self._kinds)), strict=True):
            if kind == "none" or not len(some):
                continue
            if kind == "corruption":
                new: Labeled = self._corrupted(x[some], source), y[some]
            elif kind == "out-of-client":
                new = self._of_others(client, len(some), source)
            else:
                new = self._with_labels(y[some], source)
            x = x.to(torch.promote_types(x.dtype, new[0].dtype)).clone()
            x[some], y[some] = new[0].to(x.dtype), new[1]
        return x, y

    def _corrupted(self, x: Tensor, source: np.random.Generator) -> Tensor:
        generator = Generator().manual_seed(int(source.integers(2**62)))
        kinds = source.integers(len(self._corruptions), size=len(x))
        changed = x.float() / self._info.scale
        for number in np.unique(kinds):
            rows, name = torch.from_numpy(kinds == number), self._corruptions[number]
            changed[rows] = corrupted(changed[rows], name, SEVERITY, generator)
        return as_stored(changed, self._info.scale, x.dtype)

    def _of_others(self, client: int, count: int, source: np.random.Generator) -> Labeled:
        x, y = self._others(client)
        rows = source.choice(len(y), count, replace=count > len(y))
        return x[rows], y[rows]

    def _with_labels(self, y: Tensor, source: np.random.Generator) -> Labeled:
        rows = torch.zeros_like(y)
        for label in y.unique():
            known, count = torch.nonzero(self._natural.y == label)[:, 0], int((y == label).sum())
            chosen = source.choice(len(known), count, replace=count > len(known))
            rows[y == label] = known[torch.from_numpy(chosen)]
        return self._natural.x[rows], y


def corruptions_for(info: Info) -> list[str]:
    """The benchmark's corruptions for images of this size. ValueError for other inputs."""
    if len(info.shape) != 3:
        raise ValueError(
            f"partition.test-shift corrupts images; {info.name} has inputs of shape {info.shape}"
        )
    size = min(info.shape[1:])
    return [name for name, c in CORRUPTIONS.items() if name not in OURS and c[2] <= size]
