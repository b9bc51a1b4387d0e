"""A column of a table as numbers: its cells say its kind, or it is refused by name."""

import re
from calendar import monthrange
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from partitions.datasets.description import CATEGORY, NUMBER, TRUTH, Column

MAX_CATEGORIES = 100
MIN_UNIQUE = 10  # rows, for texts that differ in every row to seem to be names of the rows
MIN_STEPS = 20  # rows, for whole numbers in steps of 1 to seem to be numbers of the rows
ID_NAME = re.compile(r"(^|[^A-Za-z0-9])(id|ids|uuid|guid|index|identifier|key)$", re.IGNORECASE)
ID_CAMEL = re.compile(r"[a-z](Id|ID)$")
INDEX = re.compile(r"__index_level_\d+__")  # how pandas and Arrow store an index without a name
UNNAMED = re.compile(r"Unnamed: \d+")  # what pandas calls a column without a name
PLAIN = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
COMMA = r"[+-]?\d+,\d+(?:[eE][+-]?\d+)?"
PLAIN_NUMBER = re.compile(PLAIN)
DECIMAL_NUMBER = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?")
COMMA_NUMBER = re.compile(COMMA)
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}([,.' ])\d{3}(\1\d{3})*([.,]\d+)?")
WITH_UNIT = re.compile(rf"[<>≤≥~]?\s*(?:{COMMA}|{PLAIN})\s*[^\d\s.,:/-][^\d]{{0,15}}\d?")
INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
NINES = re.compile(r"-?9+")  # how a missing value is often written in a column of numbers
CURRENCY = re.compile(rf"[$€£¥]\s*(?:{COMMA}|{PLAIN})")
DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ]\d{1,2}:\d{2}.*)?"
    r"|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}([T ]\d{1,2}:\d{2}.*)?"
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
    r"|\d{1,2}[. -]+[^\W\d]{3,9}[., -]+\d{2,4}|[^\W\d]{3,9}[. ]+\d{1,2}[., ]+\d{4}"  # 1 Mar 2020
)
PARTS = {"train", "training", "valid", "validation", "val", "dev", "test", "testing"}
FIRST_DAY, LAST_DAY = 19000101, 21001231  # between them eight digits may be year, month and day
LARGEST_EXACT = 2**53  # larger whole numbers are rounded as float64
LARGEST_NUMBER = 1e30  # float32, in which networks compute, ends at 3.4e38


def read_column(name: str, series: Any) -> tuple[Column, np.ndarray]:
    """The column, and its cells (n,) float64: numbers, 0 and 1, or positions in its categories; NaN
    where a cell is empty. `series` is one of pandas. Its stored index names the rows."""
    column, cells = _read(name, series)
    if INDEX.fullmatch(name):
        column = replace(column, identifier="it is pandas' index of the rows", refusal="")
    return column, cells


def _read(name: str, series: Any) -> tuple[Column, np.ndarray]:
    """The column and its cells, whatever it is called."""
    kind = series.dtype.kind
    if str(series.dtype) == "category":
        series = series.astype(object)
        kind = "O"
    if kind == "b":
        return Column(name, TRUTH), series.to_numpy(np.float64, na_value=np.nan)
    if kind in "iuf":
        return _numbers(name, series.to_numpy(np.float64, na_value=np.nan))
    if kind in "Mm" and series.notna().any():
        return _refused(name, _dates(name, str(series.dropna().iloc[0])), len(series))
    known = series.notna().to_numpy()
    cells = np.array(series.to_numpy(dtype=object))  # a copy: pandas' own may be read-only
    if all(isinstance(cell, bool | np.bool_) for cell in cells[known]):
        kind = TRUTH if known.any() else NUMBER
        return Column(name, kind), _filled(cells[known].astype(np.float64), known)
    if all(isinstance(cell, Real | Decimal) for cell in cells[known]):
        return _numbers(name, _filled(cells[known].astype(np.float64), known))
    if not all(isinstance(cell, str) for cell in cells[known]):
        cells[known] = [str(cell) for cell in cells[known]]
    return _texts(name, cells, known)


def decimal_comma(series: Any) -> Any:
    """A series of texts as numbers, if all of them are whole numbers and decimals with a comma, and
    some have one; else unchanged."""
    if series.dtype.kind != "O":  # pandas' texts, of object or of its own type
        return series
    known = series.dropna()
    if not len(known) or not all(isinstance(cell, str) for cell in known):
        return series
    cells = known.str.strip()
    commas = cells.str.fullmatch(COMMA_NUMBER.pattern)
    if not commas.any() or not (commas | cells.str.fullmatch(r"[+-]?\d+")).all():
        return series
    grouped = cells.str.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+")
    if grouped[commas].all():  # 1,234 may be a thousand, or a bit more than one
        return series
    return series.str.strip().str.replace(",", ".").astype(np.float64)


def _numbers(name: str, values: np.ndarray) -> tuple[Column, np.ndarray]:
    infinite = np.flatnonzero(np.isinf(values))
    if len(infinite):
        refusal = _infinite(name, len(infinite), int(infinite[0]))
        return Column(name, NUMBER, refusal=refusal), values
    if refusal := out_of_range(values):
        refusal = f"column {name} holds {refusal}, or leave the column out (ignore={name})"
        return Column(name, NUMBER, refusal=refusal), values
    if day := _day_number(values):
        return Column(name, NUMBER, refusal=_dates(name, day)), values
    return Column(name, NUMBER, identifier=_identifier(name, values)), values


def mark_of_gaps(column: Column, cells: np.ndarray) -> str:
    """A sentence on a number such as −999 in cells (n,), NaN where there is none, that may mark a
    missing value; "" without one.

    It is written with nines, stands in two cells or more, and lies further from all other numbers
    than these from each other."""
    if column.kind != NUMBER:
        return ""
    numbers = cells[~np.isnan(cells)]
    for mark in np.unique(numbers)[[0, -1]] if len(numbers) else ():
        others = numbers[numbers != mark]
        count = len(numbers) - len(others)
        if count < 2 or not len(others) or not NINES.fullmatch(f"{mark:g}"):
            continue
        low, high = others.min(), others.max()
        if min(abs(low - mark), abs(high - mark)) > high - low > 0:
            return (
                f"column {column.name}: {count} cells hold {mark:g}, far from all others "
                f"({low:g} to {high:g}); if it marks a missing value, leave these cells empty and "
                "set missing=mean"
            )
    return ""


def _infinite(name: str, count: int, row: int) -> str:
    return (
        f"column {name} holds infinity, in {count} cells, the first in row {row} (from 0); leave "
        f"these cells empty, or leave the column out (ignore={name})"
    )


def out_of_range(values: np.ndarray) -> str:
    """What is wrong with numbers that float32 cannot scale, and what to write; "" if it can.
    Numbers may be NaN."""
    sizes = np.abs(values[~np.isnan(values)])
    largest = float(sizes.max(initial=0))
    if 0 < largest < 1 / LARGEST_NUMBER:
        return f"no number above {largest:g}; give them in a smaller unit"
    if largest > LARGEST_NUMBER:
        return f"numbers up to {largest:g}; give them in a larger unit"
    return ""


def _day_number(values: np.ndarray) -> str:
    """The first of numbers such as 20240131 that are all days of a calendar; "" if they are not.
    Their differences are no numbers of days. Gaps say nothing."""
    days = np.unique(values[~np.isnan(values)])
    if len(days) < 2 or (days % 1 != 0).any() or days[0] < FIRST_DAY or days[-1] > LAST_DAY:
        return ""
    for day in days.astype(int).tolist():
        year, rest = divmod(day, 10000)
        month, day_of_month = divmod(rest, 100)
        if not 1 <= month <= 12 or not 1 <= day_of_month <= monthrange(year, month)[1]:
            return ""
    return str(int(days[0]))


def _identifier(name: str, values: np.ndarray) -> str:
    """Why whole numbers seem to name their rows; "" if they do not. Gaps say nothing."""
    values = values[~np.isnan(values)]
    if len(values) < 2 or (values % 1 != 0).any():
        return ""
    unique = np.unique(values)
    differs = len(unique) == len(values)
    in_steps = differs and bool((np.diff(unique) == 1).all())
    if UNNAMED.fullmatch(name) and in_steps:
        return "it has no name and numbers the rows"
    if _has_name_of_identifier(name) and (differs or len(unique) > MIN_STEPS):
        return "it has the name of an identifier"
    if in_steps and len(values) >= MIN_STEPS and (np.diff(values) == 1).all():
        return "it numbers the rows"
    return ""


def _has_name_of_identifier(name: str) -> bool:
    return bool(ID_NAME.search(name) or ID_CAMEL.search(name))


def _texts(name: str, cells: np.ndarray, known: np.ndarray) -> tuple[Column, np.ndarray]:
    """A column of texts: categories, or the reason why it cannot be an input."""
    texts = np.array([cell.strip() for cell in cells[known]], dtype=object)
    rows = np.flatnonzero(known)
    if not len(texts):
        return Column(name, NUMBER), np.full(len(cells), np.nan)
    categories, codes = np.unique(texts.astype(str), return_inverse=True)
    values = _filled(codes.astype(np.float64), known)
    column = Column(name, CATEGORY, tuple(categories.tolist()))
    refusal = _no_category(name, texts, rows, len(categories))
    if refusal:
        return Column(name, CATEGORY, column.categories, refusal=refusal), values
    differs = len(categories) == len(texts)
    if differs and (len(texts) >= MIN_UNIQUE or _has_name_of_identifier(name)):
        reason = "its texts differ in every row"
        return Column(name, CATEGORY, column.categories, reason), values
    if len(categories) > MAX_CATEGORIES:
        refusal = (
            f"column {name} holds {len(categories)} different texts such as "
            f"{str(texts[0])!r:.60}; categories are at most {MAX_CATEGORIES}: make numbers or "
            f"fewer categories of them, or leave the column out (ignore={name})"
        )
        return Column(name, CATEGORY, column.categories, refusal=refusal), values
    return column, values


def _no_category(name: str, texts: np.ndarray, rows: np.ndarray, count: int) -> str:
    """Why most of the `texts`, in these rows, are no categories; "" if they may be."""
    leave = f"or leave the column out (ignore={name})"
    dates = _matching(texts, DATE)
    if 2 * dates.sum() > len(texts):
        return _dates(name, str(texts[dates][0]))
    parts = {str(text).lower() for text in texts}
    if len(parts) > 1 and parts <= PARTS:
        return (
            f"column {name} holds {' and '.join(sorted(parts))}, which name parts of the data; to "
            "keep these parts write them into a folder, as train.parquet and test.parquet; "
            f"ignore={name} leaves the column out, and mixes them"
        )
    numbers = _matching(texts, PLAIN_NUMBER)
    decimals = _matching(texts, DECIMAL_NUMBER)
    if numbers.all() and decimals.any():
        return (
            f"column {name} holds numbers that are stored as texts, such as "
            f"{str(texts[decimals][0])!r:.40}; store them as numbers, as pandas.to_numeric makes "
            f"them, {leave}"
        )
    grouped = _matching(texts, GROUPED) & ~numbers
    if 2 * (grouped | numbers).sum() > len(texts) and grouped.any():
        return (
            f"column {name} holds numbers such as {str(texts[grouped][0])!r:.40}, whose comma or "
            "point may separate thousands or decimals; write plain numbers with a decimal point, "
            f"{leave}"
        )
    commas = _matching(texts, COMMA_NUMBER)
    infinite = _matching(texts, INFINITE)
    if infinite.any() and (infinite | numbers | commas).all():
        first = int(np.flatnonzero(infinite)[0])
        return _infinite(name, int(infinite.sum()), int(rows[first]))
    units = (_matching(texts, WITH_UNIT) | _matching(texts, CURRENCY)) & ~numbers
    if units.any() and 2 * (units | numbers | commas).sum() > len(texts):
        return (
            f"column {name} holds numbers with a unit or a mark such as "
            f"{str(texts[units][0])!r:.40} ({int(units.sum())} cells); write the plain number in "
            f"one unit, {leave}"
        )
    others = ~(numbers | commas)
    if others.any() and 2 * others.sum() <= len(texts) and count > 2:
        first = int(np.flatnonzero(others)[0])
        return (
            f"column {name} holds numbers, but {int(others.sum())} cells are none, such as "
            f"{str(texts[first])!r:.40} in row {rows[first]} (from 0); write a number or leave "
            f"the cell empty (missing=mean fills it), {leave}"
        )
    if commas.any() and not others.any():
        return (
            f"column {name} holds numbers with a decimal comma and others with a point, such as "
            f"{str(texts[commas][0])!r:.40}; write all with a decimal point, {leave}"
        )
    return ""


def _dates(name: str, example: str) -> str:
    return (
        f"column {name} holds dates or times such as {example!r:.40}; make numbers of them, as "
        f"days since a date, or leave the column out (ignore={name})"
    )


def _matching(texts: np.ndarray, pattern: re.Pattern[str]) -> np.ndarray:
    return np.array([bool(pattern.fullmatch(text)) for text in texts], dtype=bool)


def _filled(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """`values` of the known cells (n,); NaN in the others."""
    filled = np.full(len(known), np.nan)
    filled[known] = values
    return filled


def _refused(name: str, refusal: str, count: int) -> tuple[Column, np.ndarray]:
    return Column(name, NUMBER, refusal=refusal), np.full(count, np.nan)
