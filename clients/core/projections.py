"""Projections of samples: a few numbers by which a server sees whether nodes hold the same samples,
or the same frozen parameters.

A hash would also tell samples apart that differ by rounding alone, as resized images do on unlike
processors."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# (a, b) of each projection: irrational, so that no pattern in the samples repeats with them.
FREQUENCIES = ((2**0.5, 3**0.5), (5**0.5, 7**0.5), (11**0.5, 13**0.5), (17**0.5, 19**0.5))
TOLERANCE = 0.01
AT_ONCE = 1024  # samples
FIRST = 1000  # values of a parameter


def projections(x: Tensor) -> str:
    """Σ_ij 2 cos(a i²) cos(b j²) x_ij / ‖x‖ for each (a, b), of samples x (n, *shape), to three
    decimals. Samples that have nothing to do with each other give numbers that differ by about 1.

    The order of the samples counts."""
    a, b = torch.tensor(FREQUENCIES, dtype=torch.float64).T
    sums = torch.zeros(len(FREQUENCIES), dtype=torch.float64)
    squares = 0.0
    first = 0
    for part in x.split(AT_ONCE):
        values = part.flatten(1).double().cpu()
        i = torch.arange(first, first + len(values), dtype=torch.float64)
        j = torch.arange(values.shape[1], dtype=torch.float64)
        along_samples = torch.cos(a[:, None] * i**2)
        along_values = torch.cos(b[:, None] * j**2)
        sums += 2 * (along_samples * (along_values @ values.T)).sum(1)
        squares += float((values**2).sum())
        first += len(values)
    norm = squares**0.5 or 1.0
    return " ".join(f"{number:.3f}" for number in (sums / norm).tolist())


def projections_of_parameters(parameters: Iterable[Tensor]) -> str:
    """`projections` of the first values of each parameter, whose norms are made 1: large values of
    one do not hide the others."""
    firsts = []
    for parameter in parameters:
        values = parameter.detach().flatten()[:FIRST]
        if values.is_complex():
            values = torch.view_as_real(values).flatten()
        values = values.double().cpu()
        firsts.append((values / values.norm()).nan_to_num(0, 0, 0))
    return projections(torch.cat(firsts)[None])


def are_alike(one: str, other: str) -> bool:
    """Whether two texts of `projections` are of the same samples, up to rounding."""
    pairs = zip(read_projections(one), read_projections(other), strict=True)
    return all(abs(x - y) <= TOLERANCE for x, y in pairs)


def read_projections(text: str) -> list[float]:
    """The numbers of a text of `projections`. Raises ValueError for another text."""
    numbers = [float(word) for word in str(text)[:200].split()]
    if len(numbers) != len(FREQUENCIES) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"must be {len(FREQUENCIES)} finite numbers")
    return numbers
