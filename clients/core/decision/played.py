"""Newcomers that a training client plays with labeled samples: other classes, other inputs.

A newcomer has 20, 50 or 100 samples, of a client that holds out as many: one with fewer than 20
plays none, since so few say little of clients with more. Four tenths have the client's own
classes; the others have one, two or three classes, or proportions from Dirichlet(0.1) or
Dirichlet(1). Four tenths have unchanged inputs; the others have one change of random strength."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clients.core.decision.changes import Change, Changer

SIZES = (20, 50, 100)
UNCHANGED = 0.4  # share of newcomers with the client's own classes, and with unchanged inputs
FEW = (1, 2, 3)  # numbers of classes
CONCENTRATIONS = (0.1, 1.0)  # of the Dirichlet distributions
FEWEST = 2  # samples of a newcomer: one has no batch statistics


@dataclass(frozen=True)
class Newcomer:
    """Inputs x (n, *shape), labels y (n,), and whether the inputs are unchanged."""

    x: Tensor
    y: Tensor
    unchanged: bool


def proportions(present: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Class proportions (C,) over the classes that are `present` (C,): a few equal ones, or a draw
    from a Dirichlet distribution."""
    classes = np.flatnonzero(present)
    q = np.zeros(len(present))
    kind = draw.integers(len(FEW) + len(CONCENTRATIONS))
    if kind < len(FEW):
        chosen = draw.permutation(classes)[: FEW[kind]]
        q[chosen] = 1 / len(chosen)
        return q
    concentration = CONCENTRATIONS[kind - len(FEW)]
    q[classes] = draw.dirichlet(np.full(len(classes), concentration))
    return q


def rows_of_proportions(
    y: np.ndarray, q: np.ndarray, size: int, draw: np.random.Generator
) -> np.ndarray:
    """Rows of labels y (N,), none twice: `size` by the proportions q (C,), fewer where a class has
    not enough samples."""
    chosen = []
    for label, count in enumerate(draw.multinomial(size, q / q.sum())):
        rows = np.flatnonzero(y == label)
        chosen.append(draw.permutation(rows)[:count])
    return np.concatenate(chosen)


def newcomers(
    x: Tensor,
    y: Tensor,
    num_classes: int,
    count: int,
    changes: Sequence[Change],
    seed: int,
    whole: bool = False,
) -> Iterator[Newcomer]:
    """`count` newcomers of samples x (N, *shape), y (N,); fewer where a class has too few samples,
    none for N < 20. `whole`: x are whole numbers."""
    sizes = [size for size in SIZES if size <= len(y)]
    if not sizes:
        return
    draw = np.random.default_rng(seed)
    labels = y.cpu().numpy()
    present = np.bincount(labels, minlength=num_classes) > 0
    changer = Changer(x, whole) if changes else None
    for _ in range(count):
        size = int(draw.choice(sizes))
        if draw.random() < UNCHANGED:
            rows = draw.permutation(len(labels))[:size]
        else:
            q = proportions(present, draw)
            rows = rows_of_proportions(labels, q, size, draw)
        unchanged = draw.random() < UNCHANGED or changer is None
        index = torch.from_numpy(rows).to(x.device)
        inputs = x[index]
        if changer is not None and not unchanged:
            change = changes[int(draw.integers(len(changes)))]
            inputs = changer(change, inputs, draw)
        if len(rows) >= FEWEST:
            yield Newcomer(inputs, y[index], bool(unchanged))
