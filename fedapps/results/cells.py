"""Numbers as the cells of every table: one summary over seeds, one way to write it."""

from math import isnan
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pandas import Series

UNKNOWN = "–"


class Summarized(NamedTuple):
    """Mean and standard deviation over seeds. `deviation` is NaN for fewer than two values, and
    `mean` for none."""

    mean: float
    deviation: float


def summarize(values: "Series") -> Summarized:
    """Mean and sample standard deviation of the values that are known."""
    known = values.dropna()
    return Summarized(float(known.mean()), float(known.std()))


def number_cell(value: float, digits: int, *, signed: bool = False) -> str:
    """``1.20``, if `signed` ``+1.20``; the minus sign is a typographic one. – for NaN."""
    if isnan(value):
        return UNKNOWN
    sign = "+" if signed else ""
    return f"{value:{sign}.{digits}f}".replace("-", "−")


def spread_cell(mean: float, deviation: float, digits: int) -> str:
    """``1.20 ± 0.30``; the mean alone if the deviation is NaN."""
    mean_text = number_cell(mean, digits)
    if isnan(deviation):
        return mean_text
    return f"{mean_text} ± {number_cell(deviation, digits)}"


def seeds_cell(values: "Series", digits: int) -> str:
    """Mean ± standard deviation over seeds; the mean alone of one seed, and – of none."""
    mean, deviation = summarize(values)
    return spread_cell(mean, deviation, digits)


def mean_cell(values: "Series", digits: int) -> str:
    """The mean over seeds; – if it is unknown, as in private runs."""
    return number_cell(summarize(values).mean, digits)
