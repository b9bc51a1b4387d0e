"""Other test samples for training clients: the five test sets of FedTHE (Jiang and Lin, ICLR 2023).

A client's test samples are replaced by equally many others; nothing else changes. "corruption": the
same images, each with a random corruption at severity 5. "out-of-client": test samples of other
training clients. "natural": images of another dataset with the same classes and the same labels.
"mixture": equal parts of unchanged samples and of these three. All images of a client have the same
angle of motion and the same fog. Departs from the authors' code: a mixture has as many samples as
the other test sets."""

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
NATURAL = {"mnist": "digits"}  # dataset → the dataset with naturally shifted images
# Corruptions that are not among the 15 of Hendrycks and Dietterich's benchmark.
OURS = ("speckle-noise", "blur", "inversion", "background")
SEVERITY = 5


class ShiftedTests:
    """Shifted test samples for the clients of a dataset, of the kind ``partition.test-shift``.

    ``others(client)`` returns the test samples of the other training clients. Raises ValueError if
    the dataset has no such shift."""

    def __init__(
        self, config: Config, dataset: Dataset, seed: int, others: Callable[[int], Labeled]
    ) -> None:
        kind = str(config["partition.test-shift"])
        info = dataset.info
        self._info = info
        self._seed = seed
        self._others = others
        natural_name = NATURAL.get(info.name, "")
        if kind == "natural" and not natural_name:
            raise ValueError(
                f"partition.test-shift is 'natural', but {info.name} has no natural shift; "
                f"datasets that have: {', '.join(NATURAL)}"
            )
        self._kinds = [kind]
        if kind == "mixture":
            self._kinds = ["none", "corruption", "out-of-client"]
            if natural_name:
                self._kinds.append("natural")
        self._corruptions: list[str] = []
        if "corruption" in self._kinds:
            self._corruptions = corruptions_for(info)
        if "natural" in self._kinds:
            natural = configured({**config, "dataset": natural_name})
            self._natural = translated(natural, dataset)

    def __call__(self, client: int, x: Tensor, y: Tensor) -> Labeled:
        """Inputs and labels that replace the client's test samples x and y."""
        draws = np.random.default_rng(seed_of(self._seed, "shifted tests", client))
        rows = np.arange(len(y))
        if len(self._kinds) > 1:
            rows = draws.permutation(len(y))
        y = y.clone()
        rows_of_kinds = np.array_split(rows, len(self._kinds))
        for kind, kind_rows in zip(self._kinds, rows_of_kinds, strict=True):
            if kind == "none" or not len(kind_rows):
                continue
            if kind == "corruption":
                new_x = self._corrupted(x[kind_rows], draws)
                new_y = y[kind_rows]
            elif kind == "out-of-client":
                new_x, new_y = self._of_others(client, len(kind_rows), draws)
            else:
                new_x, new_y = self._with_labels(y[kind_rows], draws)
            # Corrupted inputs may be floats where the stored ones are whole numbers.
            x = x.to(torch.promote_types(x.dtype, new_x.dtype)).clone()
            x[kind_rows] = new_x.to(x.dtype)
            y[kind_rows] = new_y
        return x, y

    def _corrupted(self, x: Tensor, draws: np.random.Generator) -> Tensor:
        """The inputs, each with one of the corruptions."""
        generator = Generator().manual_seed(int(draws.integers(2**62)))
        kinds = draws.integers(len(self._corruptions), size=len(x))
        changed = x.float() / self._info.scale
        for number in np.unique(kinds):
            rows = torch.from_numpy(kinds == number)
            name = self._corruptions[number]
            changed[rows] = corrupted(changed[rows], name, SEVERITY, generator)
        return as_stored(changed, self._info.scale, x.dtype)

    def _of_others(self, client: int, count: int, draws: np.random.Generator) -> Labeled:
        """`count` test samples of other training clients, repeated only if there are too few."""
        x, y = self._others(client)
        rows = draws.choice(len(y), count, replace=count > len(y))
        return x[rows], y[rows]

    def _with_labels(self, y: Tensor, draws: np.random.Generator) -> Labeled:
        """Inputs of the natural shift with the labels y."""
        rows = torch.zeros_like(y)
        for label in y.unique():
            candidates = torch.nonzero(self._natural.y == label)[:, 0]
            count = int((y == label).sum())
            chosen = draws.choice(len(candidates), count, replace=count > len(candidates))
            rows[y == label] = candidates[torch.from_numpy(chosen)]
        return self._natural.x[rows], y


def corruptions_for(info: Info) -> list[str]:
    """The benchmark's corruptions for images of this size. ValueError for other inputs."""
    if len(info.shape) != 3:
        raise ValueError(
            f"partition.test-shift corrupts images; {info.name} has inputs of shape {info.shape}"
        )
    side = min(info.shape[1:])
    names = []
    for name, (_, _, min_side) in CORRUPTIONS.items():
        if name not in OURS and min_side <= side:
            names.append(name)
    return names
