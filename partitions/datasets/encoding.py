"""A table's columns as numbers for a network: learnt from training clients, held by the run.

A number stays a number, a truth value becomes 0 or 1, and a category becomes one column of 0 and 1
for each value that the training clients' training rows have. Where these rows have gaps and
missing=mean, a column follows that is 1 in the gaps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapps.common.memory_limits import check_size
from partitions.datasets.description import (
    CATEGORY,
    NUMBER,
    SHOWN,
    TRUTH,
    Column,
    Description,
    listed,
)

REFUSE, MEAN = "refuse", "mean"  # values of missing


@dataclass(frozen=True)
class Feature:
    """A column that is an input of the run's network.

    `categories` are those of the training rows, `fill` is the training mean, which replaces a gap.
    With `marks_gaps` a column of 0 and 1 follows that marks the gaps."""

    name: str
    kind: str
    categories: tuple[str, ...] = ()
    fill: float = 0.0
    marks_gaps: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the columns that the network gets."""
        names = [self.name]
        if self.kind == CATEGORY:
            names = [f"{self.name}={category}" for category in self.categories]
        if self.marks_gaps:
            names.append(f"{self.name} is missing")
        return tuple(names)


@dataclass(frozen=True)
class Encoding:
    """How a run reads tables: its features in order, and whether gaps are filled by the mean."""

    features: tuple[Feature, ...]
    missing: str = REFUSE

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the columns that the network gets."""
        names: list[str] = []
        for feature in self.features:
            names += feature.outputs
        return tuple(names)

    @property
    def scaled(self) -> np.ndarray:
        """Whether each column that the network gets is a number, to be standardised, (d,)."""
        marks: list[bool] = []
        for feature in self.features:
            marks.append(feature.kind == NUMBER)
            marks += [False] * (len(feature.outputs) - 1)
        return np.array(marks, dtype=bool)

    def text(self, scaled: str) -> str:
        """The kinds of the columns, for people; `scaled` says how numbers are scaled."""
        kinds = Counter(feature.kind for feature in self.features)
        parts = []
        if kinds[NUMBER]:
            parts.append(f"{kinds[NUMBER]} numeric columns{scaled}")
        if kinds[TRUTH]:
            parts.append(f"{kinds[TRUTH]} of truth values")
        if kinds[CATEGORY]:
            parts.append(f"{kinds[CATEGORY]} of categories")
        return ", ".join(parts)

    def encode(
        self, x: np.ndarray, description: Description, source: str, notes: list[str]
    ) -> np.ndarray:
        """Cells x (n, columns) of a table with this description, in any order, as (n, d) float64.

        What is left out, unknown or filled is added to `notes`. Raises ValueError for a column
        that is missing, of another kind, or has gaps where the run fills none."""
        columns = {column.name: number for number, column in enumerate(description.columns)}
        missing = [feature.name for feature in self.features if feature.name not in columns]
        if missing:
            near = f"; its columns: {listed(description.names)}"
            raise ValueError(
                f"{source} has no column {listed(missing)}, which the run was trained on{near}"
            )
        width = len(self.outputs)
        check_size(8 * width * len(x), f"{source} with {width} columns for the network")
        parts = []
        for feature in self.features:
            number = columns[feature.name]
            column = description.columns[number]
            parts.append(self._encoded(feature, column, x[:, number], source, notes))
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(x), 0))

    def _encoded(
        self, feature: Feature, column: Column, cells: np.ndarray, source: str, notes: list[str]
    ) -> np.ndarray:
        """The columns (n, outputs) of one feature."""
        if column.refusal and column.kind != feature.kind:
            raise ValueError(f"{source}: {column.refusal}")
        gaps = np.isnan(cells)
        if gaps.any() and self.missing != MEAN:
            raise ValueError(
                f"{source}: {_gaps_text(column, gaps)}, and the run was trained without "
                "missing=mean, so it fills no gaps; fill them in, leave these rows out "
                "(skip-broken), or train a run with missing=mean"
            )
        if gaps.any():
            notes.append(f"{source}: column {column.name} has {gaps.sum()} gaps, which are filled")
        if feature.kind == CATEGORY:
            encoded = self._one_hot(feature, column, cells, source, notes)
        else:
            if column.kind == CATEGORY and not gaps.all():
                raise ValueError(
                    f"{source}: column {column.name} holds texts such as "
                    f"{column.categories[0]!r:.60}; the run takes a {feature.kind} there"
                )
            if feature.kind == TRUTH and not np.isin(cells[~gaps], (0, 1)).all():
                wrong = cells[~gaps][~np.isin(cells[~gaps], (0, 1))][0]
                raise ValueError(
                    f"{source}: column {column.name} holds {wrong:g}; the run takes truth values "
                    "there (true and false, or 1 and 0)"
                )
            encoded = np.where(gaps, feature.fill, cells)[:, None]
        if feature.marks_gaps:
            encoded = np.concatenate([encoded, gaps[:, None]], axis=1)
        return encoded.astype(np.float64)

    @staticmethod
    def _one_hot(
        feature: Feature, column: Column, cells: np.ndarray, source: str, notes: list[str]
    ) -> np.ndarray:
        """A column of 0 and 1 for each category (n, categories); unknown ones have none."""
        if column.kind == NUMBER and not (cells % 1 > 0).any():  # codes without a leading zero
            numbers, codes = np.unique(cells, return_inverse=True)
            column = Column(column.name, CATEGORY, tuple(f"{number:.0f}" for number in numbers))
            cells = np.where(np.isnan(cells), np.nan, codes)
        # A file reader makes truth values of the texts true and false where there are no others.
        spelled = {category.casefold(): category for category in feature.categories}
        if column.kind == TRUTH and spelled.keys() & {"false", "true"}:
            texts = (spelled.get("false", "False"), spelled.get("true", "True"))
            column = Column(column.name, CATEGORY, texts)
        if column.kind != CATEGORY and not np.isnan(cells).all():
            raise ValueError(
                f"{source}: column {column.name} holds a {column.kind}; the run takes one of the "
                f"texts {listed(feature.categories)} there"
            )
        at = {category: number for number, category in enumerate(feature.categories)}
        encoded = np.zeros((len(cells), len(at)))
        unknown: Counter[str] = Counter()
        for code in np.unique(cells[~np.isnan(cells)]).astype(int).tolist():
            rows = cells == code
            category = column.categories[code]
            if category in at:
                encoded[rows, at[category]] = 1
            else:
                unknown[category] = int(rows.sum())
        if unknown:
            shown = ", ".join(f"{name!r:.60} ({n} rows)" for name, n in unknown.most_common(SHOWN))
            notes.append(
                f"{source}: column {column.name} has categories that the training clients do not "
                f"have, and that count as none: {shown}"
            )
        return encoded


def fit(
    x: np.ndarray,
    description: Description,
    training: np.ndarray,
    names: Sequence[str],
    missing: str,
    source: str,
    notes: list[str],
) -> Encoding:
    """The encoding of the columns `names` of a table, x (n, columns), by its `training` rows.

    Columns that are the same in all training rows are left out, and named in `notes`. Raises
    ValueError for columns that cannot be inputs, and for gaps unless `missing` is "mean"."""
    features: list[Feature] = []
    constant: list[str] = []
    for name in names:
        number = description.names.index(name)
        column = description.columns[number]
        if column.refusal:
            raise ValueError(f"{source}: {column.refusal}")
        gaps = np.isnan(x[:, number])
        if gaps.any() and missing != MEAN:
            raise ValueError(gaps_in(source, column, gaps))
        feature = _feature(column, x[training, number])
        if feature is None:
            constant.append(name)
        else:
            features.append(feature)
    if constant:
        notes.append(
            f"{source}: columns are left out, since all training rows hold the same: "
            f"{listed(constant)}"
        )
    if not features:
        raise ValueError(
            f"{source} has no column of inputs that differs between training rows; its columns: "
            f"{listed(description.names)}"
        )
    return Encoding(tuple(features), missing)


def _feature(column: Column, cells: np.ndarray) -> Feature | None:
    """The feature of a column by its training cells; None if all of them are the same."""
    gaps = np.isnan(cells)
    known = cells[~gaps]
    if not len(known):
        return None
    if column.kind == CATEGORY:
        codes = np.unique(known).astype(int).tolist()
        categories = [column.categories[code] for code in codes]
        return feature_of(column, len(codes) > 1, bool(gaps.any()), categories=categories)
    differs = known.min() != known.max()
    return feature_of(column, bool(differs), bool(gaps.any()), mean=float(known.mean()))


def feature_of(
    column: Column,
    differs: bool,
    has_gaps: bool,
    *,
    mean: float = 0.0,
    categories: Sequence[str] = (),
) -> Feature | None:
    """The feature of a column; None if it says nothing: its training cells neither differ nor have
    gaps. `mean` is that of the cells with a number, `categories` are those of the others."""
    if not differs and not has_gaps:
        return None
    if column.kind == CATEGORY:
        return Feature(column.name, CATEGORY, tuple(sorted(categories)), 0.0, has_gaps)
    return Feature(column.name, column.kind, (), mean, has_gaps)


def gaps_in(source: str, column: Column, gaps: np.ndarray) -> str:
    """The sentence that refuses a column with gaps (n,)."""
    return (
        f"{source}: {_gaps_text(column, gaps)}; set missing=mean to fill gaps with the training "
        "clients' mean and to mark them, fill them in, leave these rows out (skip-broken=0.1 does, "
        "up to a tenth of all rows), or leave the column out "
        f"(ignore={column.name})"
    )


def _gaps_text(column: Column, gaps: np.ndarray) -> str:
    """How many cells of a column are gaps, and where the first is."""
    return (
        f"column {column.name} has {int(gaps.sum())} cells without a value, the first in row "
        f"{int(gaps.argmax())} (from 0)"
    )


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each column of x (n, d), float64, (d,) each.

    Equal numbers are their own mean, and their deviation is 0: a rounded mean would leave a
    deviation such as 10⁻¹⁷, by which another number would become 10¹⁶."""
    values = x.astype(np.float64)
    mean = values.mean(0)
    deviation = values.std(0)
    equal = values.min(0) == values.max(0)
    mean[equal] = values[0, equal]
    deviation[equal] = 0
    return mean, deviation
