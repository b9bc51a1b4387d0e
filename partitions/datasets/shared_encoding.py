"""The one encoding of inputs that the `statistics` of separate nodes give together."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from fedapps.common.tasks import VALUES, Targets
from partitions.datasets.alike import note_alike
from partitions.datasets.description import (
    CATEGORY,
    IMAGE,
    NUMBER,
    SIGNAL,
    TABLE,
    VECTOR,
    listed,
)
from partitions.datasets.encoding import Encoding, Feature, feature_of
from partitions.datasets.statistics import Statistics, Sums

FAR = 30  # times as large or as small: numbers in another unit


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
        if note := note_alike(feature.categories, f"column {column.name}:", "categories"):
            notes.append(note)
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


def in_other_units(encoding: SharedEncoding, sent: Sequence[Sent]) -> list[str]:
    """For each client whose numbers in a column, or values to predict, are `FAR` from those of most
    clients, a sentence that says so."""
    texts: list[str] = []
    columns_of_clients = []
    for entry in sent:
        columns_of_clients.append({column.name: column for column in entry.statistics.columns})
    for position, name in encoding.numbers().items():
        if encoding.table is None:
            key = str(position)
            title = name
        else:
            key = name
            title = f"column {name}"
        texts += _far(title, sent, [columns[key] for columns in columns_of_clients])
    for number in range(len(encoding.targets.std)):
        values = [entry.statistics.targets[number] for entry in sent]
        texts += _far(f"value {number} to predict", sent, values)
    return texts


def _far(title: str, sent: Sequence[Sent], columns: Sequence[Sums]) -> list[str]:
    """The sentences of `in_other_units` about one column of each client."""
    sizes = []  # roots of mean squares; 0 without a number
    for column in columns:
        sizes.append(math.hypot(column.mean, math.sqrt(column.squares / (column.count or 1))))
    usual = median(sizes)
    texts: list[str] = []
    for entry, size in zip(sent, sizes, strict=True):
        if min(size, usual) > 0 and max(size / usual, usual / size) > FAR:
            texts.append(
                f"{entry.sender}, {title}: numbers are about {size:.2g}, on most nodes about "
                f"{usual:.2g}; unless they are so, give all nodes one unit"
            )
    return texts


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
    varies = any(column.squares > 0 for column in columns)  # from sample to sample
    means = tuple(column.mean for column in columns)
    if not varies and len(set(means)) == 1:
        raise ValueError(
            "standardize is 'training-clients', but all numbers in the training clients' inputs "
            "are equal; leave it out"
        )
    if inputs == IMAGE:
        (pixels,) = columns
        # A simulation scales pixels by torch's deviation, whose divisor is n − 1.
        std = _deviation(pixels.squares, pixels.count - 1)
        return SharedEncoding(IMAGE, means, (std,), targets=targets)
    stds = tuple(_deviation(column.squares, column.count) for column in columns)
    return SharedEncoding(inputs, means, stds, targets=targets)


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
