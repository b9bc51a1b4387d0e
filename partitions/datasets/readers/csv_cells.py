"""What pandas does to the cells of a CSV file without a word: rows within one cell, short rows, and
texts that count as empty cells."""

import csv
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

TEXTS_OF_GAPS = "texts of gaps"  # of a DataFrame's `attrs`
MAX_SHOWN = 5  # texts that a note names
TOO_MANY_CELLS = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")
OPEN_QUOTE = re.compile(r"EOF inside string starting at row (\d+)")


def rows_of(text: str, separator: str) -> Any:
    """A csv.reader of the header and the rows, which separates cells as pandas does. It raises
    csv.Error for a cell that is too long."""
    lines = io.StringIO(text.lstrip("\r\n"), newline="")
    return csv.reader(lines, delimiter=separator, skipinitialspace=True)


def unreadable(error: Exception, path: Path, lines_before: int) -> str:
    """Why pandas cannot separate the cells, as a sentence. `lines_before` are the lines above the
    header, which pandas was not given."""
    if found := TOO_MANY_CELLS.search(str(error)):
        expected, line, seen = found.groups()
        return (
            f"{path}: line {int(line) + lines_before} has {seen} cells, and the header {expected}; "
            "write a name for each cell into the header, and cells that hold a separator in "
            "quotation marks"
        )
    if found := OPEN_QUOTE.search(str(error)):
        line_of_quote = int(found[1]) + 1 + lines_before
        return (
            f"{path}: a quotation mark in line {line_of_quote} has no second one; write it, or "
            "leave the first one out"
        )
    return f"{path} is no CSV file with a header ({str(error).strip()})"


def notes_on_rows(path: Path, frame: Any, text: str, separator: str) -> list[str]:
    """Notes about rows that one cell seems to hold, since a quotation mark is missing, and about
    rows with fewer cells than the header, whose last cells count as empty."""
    columns = len(frame.columns)
    may_be_short = bool(columns > 1 and frame.iloc[:, -1].isna().any())
    if '"' not in text and not may_be_short:
        return []
    held: list[int] = []
    short: list[int] = []
    try:
        rows = rows_of(text, separator)
        last_line = 0
        number = -1  # of the row; the header is none
        for row in rows:
            has_lines = rows.line_num > last_line + 1
            if has_lines and any(_holds_rows(cell, separator, columns) for cell in row):
                held.append(number)
            if 1 < len(row) < columns:
                short.append(number)
            last_line = rows.line_num
            number += bool(row)  # an empty line is no row
    except csv.Error:  # a cell that only pandas reads
        return []
    notes = []
    if held:
        notes.append(
            f"{path}: {_rows(held)} a cell that holds further lines, which look like rows; if a "
            "quotation mark is missing there, write it, else these rows are lost"
        )
    if short:
        notes.append(
            f"{path}: {_rows(short)} fewer cells than the header; the last cells count as empty, "
            "though another one may be missing"
        )
    return notes


def _holds_rows(cell: str, separator: str, columns: int) -> bool:
    """Whether a cell has a line with as many separators as a row. In a table of two columns each
    line of a text with one comma would be such a line, so nothing is said there."""
    if columns < 3 or "\n" not in cell:
        return False
    return any(line.count(separator) >= columns - 1 for line in cell.split("\n"))


def _rows(numbers: list[int]) -> str:
    """Rows as the beginning of a sentence."""
    if len(numbers) == 1:
        return f"row {numbers[0]} (from 0) has"
    return f"{len(numbers)} rows, the first of them row {numbers[0]} (from 0), have"


def texts_of_gaps(frame: Any, text: str, separator: str) -> dict[str, Counter[str]]:
    """The texts that count as empty cells, such as NA and None, with their numbers, by column. Of
    columns of numbers, where they can mean nothing else, there are none."""
    import pandas

    positions = []
    for position, name in enumerate(frame.columns):
        if frame[name].isna().any() and frame[name].dtype.kind not in "iuf":
            positions.append(position)
    if not positions:
        return {}
    written = pandas.read_csv(
        io.StringIO(text),
        sep=separator,
        index_col=False,
        usecols=positions,
        dtype=str,
        keep_default_na=False,
        skipinitialspace=True,
    )
    texts = {}
    for order, position in enumerate(positions):
        name = frame.columns[position]
        cells = written.iloc[:, order][frame[name].isna().to_numpy()]
        counts = Counter(cell for cell in cells if cell)
        if counts:
            texts[name] = counts
    return texts


def notes_on_gaps(path: Path, texts: dict[str, Counter[str]]) -> list[str]:
    """A note for each column with texts that count as empty cells."""
    notes = []
    for name, counts in texts.items():
        shown = [f"{count} {text!r}" for text, count in counts.most_common(MAX_SHOWN)]
        notes.append(
            f"{path}, column {name}: {', '.join(shown)} count as empty cells; write another text "
            "if one of them is a value"
        )
    return notes
