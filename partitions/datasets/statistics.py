"""Sums over the training rows of separate nodes, and the one encoding that they give together.

In a simulation `partitions.federations` reads all training rows at once. Real nodes keep their
rows: each sends, by column, the number of values, their mean and their squared deviations
M₂ = Σ (x − mean)², which merge without loss (Chan, Golub and LeVeque, 1979)."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from fedapps.common.tasks import VALUES, Targets
from partitions.datasets.description import (
    CATEGORY,
    IMAGE,
    NUMBER,
    SIGNAL,
    TABLE,
    TRUTH,
    VECTOR,
    Column,
    Description,
    listed,
)
from partitions.datasets.encoding import Encoding, Feature, feature_of
from partitions.datasets.readers.columns import MAX_CATEGORIES

KINDS = (TABLE, VECTOR, SIGNAL, IMAGE)
COLUMN_KINDS = (NUMBER, TRUTH, CATEGORY)
MAX_COLUMNS = 10_000
MAX_NAME = 200  # characters of a column's or a category's name
MAX_TEXT = 2**24  # characters of a client's statistics
MAX_ROWS = 10**9
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


# What a client sends is not trusted


def read_statistics(given: Any) -> Statistics:
    """The statistics in a client's reply. Raises ValueError with the first value that no client of
    this package sends."""
    if not isinstance(given, str) or len(given) > MAX_TEXT:
        raise ValueError(f"must be a text of at most {MAX_TEXT} characters")
    content = _parsed(given)
    if not isinstance(content, dict) or content.keys() != {"inputs", "rows", "columns", "targets"}:
        raise ValueError("must hold inputs, rows, columns and targets")
    inputs = content["inputs"]
    if inputs not in KINDS:
        raise ValueError(f"must be of a kind in {', '.join(KINDS)}, and inputs is {inputs!r:.80}")
    rows = _whole("rows", content["rows"], 1)
    columns = _columns("columns", content["columns"])
    targets = _columns("targets", content["targets"])
    if not columns:
        raise ValueError("must have a column")
    for sums in columns:
        _check_counts(sums, rows, inputs)
    for sums in targets:
        _check_counts(sums, rows, VECTOR)
    return Statistics(inputs, rows, columns, targets)


def _parsed(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"must be finite, and holds {constant}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("must not be nested") from error


def _columns(name: str, given: Any) -> tuple[Sums, ...]:
    if not isinstance(given, list) or len(given) > MAX_COLUMNS:
        raise ValueError(f"must have a list of at most {MAX_COLUMNS} {name}")
    columns = tuple(_sums(entry) for entry in given)
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        raise ValueError(f"must have {name} of different names")
    return columns


def _sums(given: Any) -> Sums:
    if not isinstance(given, dict) or given.keys() != Sums.__dataclass_fields__.keys():
        raise ValueError(f"must have columns with {', '.join(Sums.__dataclass_fields__)}")
    name = _name(given["name"])
    kind = given["kind"]
    if kind not in COLUMN_KINDS:
        raise ValueError(f"must have columns of {', '.join(COLUMN_KINDS)}, not {kind!r:.80}")
    categories = given["categories"]
    if not isinstance(categories, dict) or len(categories) > MAX_CATEGORIES:
        raise ValueError(f"must have at most {MAX_CATEGORIES} categories in column {name}")
    counts = {_name(key): float(_whole(name, n, 1)) for key, n in categories.items()}
    if type(given["identifier"]) is not bool:
        raise ValueError(f"must say by true or false whether {name} is an identifier")
    squares = _number(name, given["squares"])
    if squares < 0:
        raise ValueError(f"must have no negative squares, and column {name} has {squares:g}")
    return Sums(
        name,
        kind,
        _whole(name, given["count"]),
        _whole(name, given["gaps"]),
        _number(name, given["mean"], LARGEST),
        squares,
        counts,
        given["identifier"],
    )


def _check_counts(sums: Sums, rows: int, inputs: str) -> None:
    """Raise ValueError for counts that no `rows` rows have."""
    cells = sums.count + sums.gaps
    name = sums.name
    fits = cells % rows == 0 and cells > 0 if inputs in (SIGNAL, IMAGE) else cells == rows
    if not fits or (inputs != TABLE and sums.gaps):
        raise ValueError(f"must have {rows} rows, and column {name} has {cells:g} cells")
    if sum(sums.categories.values()) > sums.count or (sums.categories and sums.kind != CATEGORY):
        raise ValueError(f"must have at most {sums.count:g} categories' cells in column {name}")
    if inputs != TABLE and sums.kind != NUMBER:
        raise ValueError(f"must have numbers in column {name}")
    if sums.kind == TRUTH and not 0 <= sums.mean <= 1:
        raise ValueError(f"must have truth values in column {name}, whose mean is {sums.mean:g}")


def _name(given: Any) -> str:
    if not isinstance(given, str) or len(given) > MAX_NAME or not given.isprintable():
        raise ValueError(f"must have printable names of at most {MAX_NAME} characters")
    return given


def _whole(name: str, given: Any, least: int = 0) -> int:
    if type(given) is not int or not least <= given <= MAX_ROWS:
        raise ValueError(f"must count from {least} to {MAX_ROWS}, and {name} has {given!r:.80}")
    return given


def _number(name: str, given: Any, most: float = math.inf) -> float:
    if type(given) not in (int, float) or not abs(given) <= min(most, 1e300):
        raise ValueError(f"must have finite numbers, and column {name} has {given!r:.80}")
    return float(given)


# The encoding of all nodes


@dataclass(frozen=True)
class SharedEncoding:
    """How all nodes of a run read their inputs: a `table` by its features; then numbers as
    (x − `mean`) / `std`, by column or channel, for images one number. Values to predict are learnt
    as (y − `targets.mean`) / `targets.std`. `largest` is the largest distance of a training
    client's mean of a column, in these deviations, by which a later client's are judged."""

    inputs: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    table: Encoding | None = None
    targets: Targets = field(default_factory=Targets)
    largest: float = 0.0

    def numbers(self) -> dict[int, str]:
        """The names of the scaled columns or channels by their positions; categories, truth values
        and marks of gaps are none. Images have one, of all pixels."""
        if self.table is None:
            word = {VECTOR: "column", SIGNAL: "channel", IMAGE: "pixels"}[self.inputs]
            return {i: f"{word} {i}" if word != "pixels" else word for i in range(len(self.mean))}
        names: dict[int, str] = {}
        position = 0
        for feature in self.table.features:
            if feature.kind == NUMBER:
                names[position] = feature.name
            position += len(feature.outputs)
        return names

    def text(self) -> str:
        """As JSON; `read_encoding` reads it."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @property
    def line(self) -> str:
        """What the inputs are, for people."""
        scaled = " scaled by the training clients' statistics"
        if self.table is not None:
            return self.table.text(scaled)
        words = {VECTOR: "columns", SIGNAL: "channels", IMAGE: "image value"}
        return f"{len(self.mean)} {words[self.inputs]}{scaled}"


def read_encoding(given: Any) -> SharedEncoding:
    """The encoding in a server's message or in a saved state. Raises ValueError for any other."""
    try:
        content = _parsed(given)
        table = content["table"]
        if table is not None:
            features = [
                Feature(**entry | {"categories": tuple(map(str, entry["categories"]))})
                for entry in table["features"]
            ]
            table = Encoding(tuple(features), str(table["missing"]))
        targets = content["targets"]
        read = SharedEncoding(
            str(content["inputs"]),
            tuple(map(float, content["mean"])),
            tuple(map(float, content["std"])),
            table,
            Targets(
                str(targets["task"]),
                tuple(map(float, targets["mean"])),
                tuple(map(float, targets["std"])),
            ),
            float(content.get("largest", 0.0)),  # states of earlier versions lack it
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the encoding of inputs is damaged: {error!r:.200}") from error
    kinds_fit = read.inputs in KINDS and (read.inputs == TABLE) == (table is not None)
    sizes_fit = len(read.mean) == len(read.std) > 0
    if table is not None:
        sizes_fit = sizes_fit and len(read.mean) == len(table.outputs)
    deviations = (*read.std, *read.targets.std)
    sizes_fit = sizes_fit and 0 <= read.largest < math.inf
    if not (kinds_fit and sizes_fit and all(0 < std < math.inf for std in deviations)):
        raise ValueError("the encoding of inputs is damaged: its parts do not fit to each other")
    return read


@dataclass(frozen=True)
class Sent:
    """The statistics of a client, named `sender` for people, each of whose rows counts `weight`
    times."""

    sender: str
    statistics: Statistics
    weight: float = 1.0


def agreeing(sent: Sequence[Sent]) -> tuple[list[Sent], list[tuple[int, str]]]:
    """The statistics with the columns of the majority, and for each other its position in `sent`
    and how it differs. Raises ValueError if no majority agrees."""
    signatures = [_signature(entry.statistics) for entry in sent]
    common, votes = Counter(signatures).most_common(1)[0]
    first = signatures.index(common)
    others: list[tuple[int, str]] = []
    kinds = _kinds(sent, signatures, common)
    kept: list[Sent] = []
    for number, entry in enumerate(sent):
        difference = ""
        if signatures[number] != common:
            difference = _difference(entry.statistics, sent[first])
        else:
            for column in entry.statistics.columns:
                if column.count and column.kind != kinds[column.name]:
                    difference = (
                        f"its column {column.name} holds a {column.kind}; that of others a "
                        f"{kinds[column.name]}"
                    )
        if difference:
            others.append((number, difference))
        else:
            kept.append(entry)
    if 2 * votes <= len(sent) or 2 * len(kept) <= len(sent):
        number, difference = others[0]
        raise ValueError(
            f"the training clients have different columns, and no majority agrees: "
            f"{sent[number].sender}: {difference}; give all nodes the same columns"
        )
    return kept, others


def _signature(statistics: Statistics) -> tuple[Any, ...]:
    return (statistics.inputs, frozenset(statistics.names), len(statistics.targets))


def _kinds(
    sent: Sequence[Sent], signatures: Sequence[tuple[Any, ...]], common: tuple[Any, ...]
) -> dict[str, str]:
    """The most frequent kind of each column among clients with values in it."""
    votes: dict[str, Counter[str]] = {}
    for entry, signature in zip(sent, signatures, strict=True):
        if signature == common:
            for column in entry.statistics.columns:
                votes.setdefault(column.name, Counter())[column.kind] += bool(column.count)
    return {name: counter.most_common(1)[0][0] for name, counter in votes.items()}


def _difference(statistics: Statistics, other: Sent) -> str:
    """How the columns differ from those of `other`."""
    theirs = other.statistics
    if statistics.inputs != theirs.inputs:
        return f"its inputs are a {statistics.inputs}; those of {other.sender} a {theirs.inputs}"
    if len(statistics.targets) != len(theirs.targets):
        return (
            f"it has {len(statistics.targets)} values to predict; {other.sender} has "
            f"{len(theirs.targets)}"
        )
    lacks = [name for name in theirs.names if name not in statistics.names]
    more = [name for name in statistics.names if name not in theirs.names]
    parts = []
    if lacks:
        parts.append(f"it lacks the columns {listed(lacks)}")
    if more:
        parts.append(f"it has {listed(more)} in addition")
    return f"{' and '.join(parts)}, other than {other.sender}"


def learnt(sent: Sequence[Sent], missing: str, notes: list[str]) -> SharedEncoding:
    """The encoding by the statistics of clients with the same columns, as `Federation` makes it of
    all their rows. Columns that are left out are named in `notes`. Raises ValueError if nothing is
    left, and for values to predict that are all the same."""
    first = sent[0].statistics
    columns = _pooled(sent)
    identifiers = _identifiers(sent)
    targets = _targets(sent)
    if first.inputs != TABLE:
        return _with_largest(_of_arrays(first.inputs, columns, targets), sent)
    features: list[Feature] = []
    mean: list[float] = []
    std: list[float] = []
    constant: list[str] = []
    for column in columns:
        if column.name in identifiers:
            notes.append(f"column {column.name} is left out: on most nodes it names the rows")
            continue
        feature = _feature(column)
        if feature is None:
            constant.append(column.name)
            continue
        features.append(feature)
        others = len(feature.outputs)
        if feature.kind == NUMBER:
            # Gaps hold the mean: they add rows, and nothing to M₂.
            mean.append(column.mean)
            std.append(_deviation(column.squares, column.count + column.gaps))
            others -= 1
        mean += [0.0] * others
        std += [1.0] * others
    if constant:
        notes.append(
            f"columns are left out, since all training rows hold the same: {listed(constant)}"
        )
    if not features:
        raise ValueError(
            "the training clients have no column of inputs that differs between training rows; "
            f"their columns: {listed(first.names)}"
        )
    table = Encoding(tuple(features), missing)
    return _with_largest(SharedEncoding(TABLE, tuple(mean), tuple(std), table, targets), sent)


def _with_largest(encoding: SharedEncoding, sent: Sequence[Sent]) -> SharedEncoding:
    """The encoding with the largest distance of a client's mean from all clients' one."""
    largest = 0.0
    names = encoding.numbers()
    for entry in sent:
        columns = {column.name: column for column in entry.statistics.columns}
        for position, name in names.items():
            key = name if encoding.table is not None else str(position)
            if columns[key].count:
                distance = (columns[key].mean - encoding.mean[position]) / encoding.std[position]
                largest = max(largest, abs(distance))
    return replace(encoding, largest=largest)


def _pooled(sent: Sequence[Sent], of_targets: bool = False) -> list[Sums]:
    """The sums of each column over all clients, in the order of the first one."""
    pooled: dict[str, Sums] = {}
    for entry in sent:
        columns = entry.statistics.targets if of_targets else entry.statistics.columns
        for column in columns:
            weighed = column.weighed(entry.weight)
            before = pooled.get(column.name)
            pooled[column.name] = weighed if before is None else before.merged(weighed)
    return list(pooled.values())


def _feature(column: Sums) -> Feature | None:
    if not column.count:
        return None
    differs = column.squares > 0
    if column.kind == CATEGORY:
        named = sum(column.categories.values())
        differs = bool(column.categories) and (len(column.categories) > 1 or named < column.count)
    return feature_of(
        column.column,
        differs,
        column.gaps > 0,
        mean=column.mean,
        categories=tuple(column.categories),
    )


def _identifiers(sent: Sequence[Sent]) -> set[str]:
    """The columns that name the rows, by most clients."""
    votes: Counter[str] = Counter()
    for entry in sent:
        votes.update(column.name for column in entry.statistics.columns if column.identifier)
    return {name for name, count in votes.items() if 2 * count > len(sent)}


def _of_arrays(inputs: str, columns: Sequence[Sums], targets: Targets) -> SharedEncoding:
    """The encoding of inputs without names."""
    if not any(column.squares > 0 for column in columns) and len({c.mean for c in columns}) == 1:
        raise ValueError(
            "standardize is 'training-clients', but all numbers in the training clients' inputs "
            "are equal; leave it out"
        )
    mean = tuple(column.mean for column in columns)
    if inputs == IMAGE:  # of pixels torch's deviation, as in a simulation
        (pixels,) = columns
        return SharedEncoding(
            IMAGE, mean, (_deviation(pixels.squares, pixels.count - 1),), targets=targets
        )
    std = tuple(_deviation(column.squares, column.count) for column in columns)
    return SharedEncoding(inputs, mean, std, targets=targets)


def _targets(sent: Sequence[Sent]) -> Targets:
    """Mean and deviation of the values to predict."""
    pooled = _pooled(sent, of_targets=True)
    if not pooled:
        return Targets()
    for column in pooled:
        if not column.squares > 0:
            raise ValueError(
                f"output {column.name} is the same number in all training samples; there is "
                "nothing to learn"
            )
    mean = tuple(column.mean for column in pooled)
    std = tuple(_deviation(column.squares, column.count) for column in pooled)
    return Targets(VALUES, mean, std)


def _deviation(squares: float, count: float) -> float:
    """√(M₂ / count); 1 for a constant column, which becomes zero."""
    return math.sqrt(squares / count) or 1.0
