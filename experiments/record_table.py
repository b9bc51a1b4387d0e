"""The table of a page that has the values of a record of experiments/measured/. A page names the
record, and `experiments.fill_page` writes the table between the two lines:

    <!-- record odpfl-table1-mnist --columns "CIFAR-10, α = 0.1; CIFAR-10, α = 1.0" -->
    <!-- end -->

`--columns`, `--rows` and `--scores` choose a part of the record, names separated by semicolons.
`--turned` has the record's rows as columns. A published value stands beside ours if it is of the
same data."""

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from experiments.coverage import published_value, read_records
from fedapps.results.formats import UNKNOWN, TextTable, as_markdown, number_cell, spread_cell
from fedapps.results.runs import SCORE_COLUMNS
from fedapps.settings.published_tables import score_key

Cell = Mapping[str, Any]
PUBLISHED = "published"
UNIT_DECIMALS, PERCENT_DECIMALS = 3, 2  # of scores up to one, and of others
OLD_CODE = "measured before records kept the version of the code"


class Words(ArgumentParser):
    """The words of a page's line. Wrong ones raise ValueError."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with argparse's sentence."""
        raise ValueError(message)


def record_table(words: str) -> str:
    """The table that a page's line asks for. Raises ValueError for an unknown record or name."""
    asked = read_words(words)
    record = read_record(asked.name)
    columns = chosen("column", asked.columns, record["cells"])
    rows = chosen("row", asked.rows, record["cells"])
    scores = chosen("score", asked.scores, record["cells"])
    cells: list[Cell] = []
    for cell in record["cells"]:
        if cell["column"] in columns and cell["row"] in rows and cell["score"] in scores:
            cells.append(cell)
    lines = lines_of(cells, record["table"], columns, scores, rows)
    if asked.turned:
        lines = [list(line) for line in zip(*lines, strict=True)]
    title = asked.name
    if len(scores) == 1:
        title += f": {score_text(scores[0])}"
    table = TextTable(title, lines[0], lines[1:], caption(cells, record))
    return as_markdown(table).strip()


def read_words(words: str) -> Namespace:
    """The record's name and the options of a page's line."""
    reader = Words(prog="record", allow_abbrev=False, add_help=False)
    reader.add_argument("name")
    reader.add_argument("--columns", default="")
    reader.add_argument("--rows", default="")
    reader.add_argument("--scores", default="")
    reader.add_argument("--turned", action="store_true")
    return reader.parse_args(shlex.split(words))


def read_record(name: str) -> Mapping[str, Any]:
    """The record of this name; its scores have their present names."""
    records = read_records()
    if name not in records:
        raise ValueError(f"no record {name!r}; known: {', '.join(records)}")
    record = records[name]
    for cell in record["cells"]:
        cell["score"] = score_key(cell["score"])
    return record


def chosen(part: str, asked: str, cells: Sequence[Cell]) -> list[str]:
    """The names of the cells' `part` that are asked for, by default all in the record's order.
    Raises ValueError for a name that the record does not have."""
    known = list(dict.fromkeys(cell[part] for cell in cells))
    names = [name.strip() for name in asked.split(";") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"the record has no {part} {name!r}; known: {'; '.join(known)}")
    return names or known


def lines_of(
    cells: Sequence[Cell],
    table: str,
    columns: Sequence[str],
    scores: Sequence[str],
    rows: Sequence[str],
) -> list[list[str]]:
    """The head of the table and a line for each row; what nobody has measured has no column."""
    lines = [[""], *([row] for row in rows)]
    for column in columns:
        for score in scores:
            by_row: dict[str, Cell] = {}
            for cell in cells:
                if cell["column"] == column and cell["score"] == score:
                    by_row[cell["row"]] = cell
            if not by_row:
                continue
            title = title_of(column if len(columns) > 1 else "", score if len(scores) > 1 else "")
            lines[0].append((title or score_text(score)) + elsewhere(by_row.values(), table))
            decimals = decimals_of(by_row.values())
            for row, line in zip(rows, lines[1:], strict=True):
                line.append(value_text(by_row.get(row), decimals))
            add_published(lines, rows, by_row, table)
    return lines


def add_published(
    lines: Sequence[list[str]], rows: Sequence[str], by_row: Mapping[str, Cell], table: str
) -> None:
    """Add the published values of a column's cells to the lines, if there are any."""
    texts = {row: published_text(cell, table) for row, cell in by_row.items()}
    if not any(texts.values()):
        return
    lines[0].append(PUBLISHED)
    for row, line in zip(rows, lines[1:], strict=True):
        line.append(texts.get(row) or UNKNOWN)


def title_of(column: str, score: str) -> str:
    """The head of a column from what tells it from the others: its text, its score, or both."""
    if not score:
        return column
    if not column:
        return score_text(score)
    return f"{column}, {score_text(score)}"


def elsewhere(cells: Iterable[Cell], table: str) -> str:
    """``, on mnist`` where the column is a published one of other data; else nothing."""
    for cell in cells:
        _, dataset = published_value({**cell, "table": table})
        if dataset and dataset != cell["dataset"]:
            return f", on {cell['dataset']}"
    return ""


def score_text(score: str) -> str:
    """``novel clients, %``."""
    if score not in SCORE_COLUMNS:
        return score
    shown = SCORE_COLUMNS[score]
    return f"{shown.title}, %" if shown.score.in_percent else shown.title


def decimals_of(cells: Iterable[Cell]) -> int:
    """The record's decimals, at most two of a percentage and three of another score."""
    most = UNIT_DECIMALS
    recorded = 0
    for cell in cells:
        if abs(cell["value"]) >= 1:
            most = PERCENT_DECIMALS
        for number in (cell["value"], cell["spread"] or 0):
            recorded = max(recorded, len(str(number).partition(".")[2]))
    return min(recorded, most)


def value_text(cell: Cell | None, decimals: int) -> str:
    """Mean ± deviation over seeds, or the value of one run."""
    if cell is None:
        return UNKNOWN
    spread = float("nan") if cell["spread"] is None else cell["spread"]
    return spread_cell(cell["value"], spread, decimals)


def published_text(cell: Cell, table: str) -> str:
    """The published value; "" where there is none of the same data."""
    value, dataset = published_value({**cell, "table": table})
    if value is None or dataset != cell["dataset"]:
        return ""
    decimals = UNIT_DECIMALS if abs(value) < 1 else PERCENT_DECIMALS
    return number_cell(value, decimals)


def caption(cells: Sequence[Cell], record: Mapping[str, Any]) -> str:
    """What all values have in common, and what the record says of them."""
    parts = [
        f"data {', '.join(distinct(cells, 'dataset'))}",
        f"seeds {' and '.join(distinct(cells, 'seeds'))}",
        f"rounds {', '.join(distinct(cells, 'rounds'))}",
        record.get("note", ""),
    ]
    if any(not cell["code"] and "fingerprint" not in cell for cell in cells):
        parts.append(OLD_CODE)
    return "; ".join(part for part in parts if part)


def distinct(cells: Sequence[Cell], key: str) -> list[str]:
    """The values of the cells' key, each once."""
    texts = []
    for cell in cells:
        value = cell[key]
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if text not in texts:
            texts.append(text)
    return texts
