"""Sums over the training rows of a node.

In a simulation `partitions.federations` reads all training rows at once. Real nodes keep their
rows: each sends, by column, the number of values, their mean and their squared deviations
M₂ = Σ (x − mean)², which merge without loss (Chan, Golub and LeVeque, 1979). The server makes one
encoding of them, see `partitions.datasets.shared_encoding`."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from partitions.datasets.description import (
    CATEGORY,
    IMAGE,
    NUMBER,
    SIGNAL,
    TABLE,
    VECTOR,
    Column,
    Description,
)

KINDS = (TABLE, VECTOR, SIGNAL, IMAGE)
LARGEST = 1e100  # of a mean; squares of larger numbers overflow in a sum


@dataclass(frozen=True)
class Sums:
    """A column's values: their `count`, their `mean` and M₂ (`squares`), and the cells without one.

    Of a category's values `categories` counts those that are named, and `count` all. `identifier`:
    the column seems to name its rows."""

    name: str
    kind: str = NUMBER
    count: float = 0
    gaps: float = 0
    mean: float = 0.0
    squares: float = 0.0
    categories: dict[str, float] = field(default_factory=dict)
    identifier: bool = False

    def weighed(self, weight: float) -> "Sums":
        """The sums as if each row counted `weight` times."""
        if weight == 1:
            return self
        return replace(
            self,
            count=weight * self.count,
            gaps=weight * self.gaps,
            squares=weight * self.squares,
            categories={name: weight * count for name, count in self.categories.items()},
        )

    def merged(self, other: "Sums") -> "Sums":
        """The sums of both columns' values together."""
        count = self.count + other.count
        mean = self.mean if self.count else other.mean
        squares = self.squares + other.squares
        if self.count and other.count:
            difference = other.mean - self.mean
            mean = self.mean + difference * other.count / count
            squares += difference**2 * self.count * other.count / count
        categories = Counter(self.categories)
        categories.update(other.categories)
        return Sums(
            self.name,
            self.kind if self.count else other.kind,
            count,
            self.gaps + other.gaps,
            mean,
            squares,
            dict(categories),
        )

    @property
    def column(self) -> Column:
        """The column's name and kind."""
        return Column(self.name, self.kind)


@dataclass(frozen=True)
class Statistics:
    """What one client says about its `rows` training rows, whose inputs are one of `KINDS`.

    A table's columns have names; those of a vector and the channels of a signal have numbers, and
    all pixels of images are one. `targets` are the values to predict, if the task has such."""

    inputs: str
    rows: int
    columns: tuple[Sums, ...]
    targets: tuple[Sums, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    def text(self) -> str:
        """As JSON; `read_statistics` reads it."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)


def number_sums(name: str, values: np.ndarray) -> Sums:
    """The sums of numbers (n,), computed as float64; NaN is a gap. Raises ValueError for numbers
    whose squares overflow."""
    known = values[~np.isnan(values)].astype(np.float64)
    gaps = len(values) - len(known)
    if not len(known):
        return Sums(name, gaps=gaps)
    # Relative to the first one: equal numbers have exactly themselves as mean, and M₂ = 0.
    mean = float(known[0] + (known - known[0]).mean())
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.square(known - mean).sum())
    if not (abs(mean) <= LARGEST and math.isfinite(squares)):
        raise ValueError(f"column {name} holds numbers such as {known[0]:g}, too large to scale")
    return Sums(name, NUMBER, len(known), gaps, mean, squares)


def table_sums(cells: np.ndarray, description: Description, least_rows: int) -> tuple[Sums, ...]:
    """The sums of a table's columns, cells (n, columns). A category that fewer than `least_rows`
    rows have is not named."""
    sums: list[Sums] = []
    for number, column in enumerate(description.columns):
        values = cells[:, number]
        known = values[~np.isnan(values)]
        identifier = bool(column.identifier)
        if column.kind != CATEGORY:
            numbers = number_sums(column.name, values)
            sums.append(replace(numbers, kind=column.kind, identifier=identifier))
            continue
        counts: dict[str, float] = {}
        for code, count in zip(*np.unique(known, return_counts=True), strict=True):
            if count >= least_rows and not identifier:
                counts[column.categories[int(code)]] = int(count)
        gaps = len(values) - len(known)
        named = Sums(column.name, CATEGORY, len(known), gaps, categories=counts)
        sums.append(replace(named, identifier=identifier))
    return tuple(sums)


def array_sums(x: np.ndarray, kind: str) -> tuple[Sums, ...]:
    """The sums of arrays (n, *shape): of each column or channel, and of all pixels of images."""
    by_column = x.reshape(1, -1) if kind == IMAGE else np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    return tuple(number_sums(str(number), values) for number, values in enumerate(by_column))


def kind_of_shape(shape: tuple[int, ...]) -> str:
    """The kind of arrays of this shape, without the axis of samples. Raises ValueError for one that
    has no columns, channels or pixels."""
    kinds = {1: VECTOR, 2: SIGNAL, 3: IMAGE}
    if len(shape) not in kinds:
        raise ValueError(
            f"inputs are of shape {shape}; standardize='training-clients' scales tables, vectors, "
            "signals (channels, time) and images (channels, height, width): leave it out, and "
            "scale in `data=`"
        )
    return kinds[len(shape)]
