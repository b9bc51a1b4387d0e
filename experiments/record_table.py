"""The table of a page that has the values of a record of experiments/measured/. A page names the
record, and `experiments.fill_page` writes the table between the two lines:

    <!-- record odpfl-table1-mnist --columns "CIFAR-10, α = 0.1; CIFAR-10, α = 1.0" -->
    <!-- end -->

`--columns`, `--rows` and `--scores` choose a part of the record, names separated by semicolons.
`--turned` has the record's rows as columns. A published value stands beside ours if it is of the
same data."""

import shlex
from argparse import ArgumentParser
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Group:
    """A column of the table: one of the record's, with one score."""

    column: str
    score: str

    def holds(self, cell: Cell) -> bool:
        """Whether the cell stands in this column."""
        return bool(cell["column"] == self.column and score_key(cell["score"]) == self.score)


def record_table(words: str) -> str:
    """The table that a page's line asks for. Raises ValueError for an unknown record or name."""
    reader = Words(prog="record", allow_abbrev=False, add_help=False)
    reader.add_argument("name")
    for part in ("columns", "rows", "scores"):
        reader.add_argument(f"--{part}", default="")
    reader.add_argument("--turned", action="store_true")
    asked = reader.parse_args(shlex.split(words))
    records = read_records()
    if asked.name not in records:
        raise ValueError(f"no record {asked.name!r}; known: {', '.join(records)}")
    record = records[asked.name]
    cells = record["cells"]
    columns = chosen("column", asked.columns, [cell["column"] for cell in cells])
    rows = chosen("row", asked.rows, [cell["row"] for cell in cells])
    scores = chosen("score", asked.scores, [score_key(cell["score"]) for cell in cells])
    shown = [
        cell
        for cell in cells
        if cell["column"] in columns and cell["row"] in rows and score_key(cell["score"]) in scores
    ]
    groups = [Group(column, score) for column in columns for score in scores]
    groups = [group for group in groups if any(group.holds(cell) for cell in shown)]
    lines = lines_of(shown, record["table"], groups, rows)
    if asked.turned:
        lines = [list(line) for line in zip(*lines, strict=True)]
    title = asked.name if len(scores) > 1 else f"{asked.name}: {score_text(scores[0])}"
    table = TextTable(title, lines[0], lines[1:], caption(shown, record))
    return as_markdown(table).strip()


def chosen(part: str, asked: str, present: Iterable[str]) -> list[str]:
    """The names that are asked for, by default all in the record's order. Raises ValueError for a
    name that the record does not have."""
    known = list(dict.fromkeys(present))
    names = [name.strip() for name in asked.split(";") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"the record has no {part} {name!r}; known: {'; '.join(known)}")
    return names or known


def lines_of(
    cells: Sequence[Cell], table: str, groups: Sequence[Group], rows: Sequence[str]
) -> list[list[str]]:
    """The head of the table and a line for each row."""
    lines = [[""], *([row] for row in rows)]
    for group in groups:
        in_column = {cell["row"]: cell for cell in cells if group.holds(cell)}
        decimals = decimals_of(in_column.values())
        published = {row: published_text(cell, table) for row, cell in in_column.items()}
        lines[0].append(title_of(group, groups) + elsewhere(in_column.values(), table))
        if any(published.values()):
            lines[0].append(PUBLISHED)
        for row, line in zip(rows, lines[1:], strict=True):
            line.append(value_text(in_column.get(row), decimals))
            if any(published.values()):
                line.append(published.get(row) or UNKNOWN)
    return lines


def title_of(group: Group, groups: Sequence[Group]) -> str:
    """The head of a column: what tells it from the others."""
    parts = []
    if len({one.column for one in groups}) > 1:
        parts.append(group.column)
    if len({one.score for one in groups}) > 1 or not parts:
        parts.append(score_text(group.score))
    return ", ".join(parts)


def elsewhere(cells: Iterable[Cell], table: str) -> str:
    """``, on mnist`` where the column is a published one of other data; else nothing."""
    for cell in cells:
        _, dataset = published_value({**cell, "score": "", "table": table})
        if dataset and dataset != cell["dataset"]:
            return f", on {cell['dataset']}"
    return ""


def score_text(score: str) -> str:
    """``novel clients, %``."""
    if score not in SCORE_COLUMNS:
        return score
    shown = SCORE_COLUMNS[score]
    return f"{shown.title}, %" if shown.score.in_percent else shown.title


def decimals_of(cells: Collection[Cell]) -> int:
    """The record's decimals, at most two of a percentage and three of another score."""
    values = [cell["value"] for cell in cells]
    spreads = [cell["spread"] for cell in cells if cell["spread"] is not None]
    most = PERCENT_DECIMALS
    if all(abs(value) < 1 for value in values):
        most = UNIT_DECIMALS
    recorded = [len(str(number).partition(".")[2]) for number in [*values, *spreads]]
    return min(max(recorded, default=0), most)


def value_text(cell: Cell | None, decimals: int) -> str:
    """Mean ± deviation over seeds, or the value of one run."""
    if cell is None:
        return UNKNOWN
    spread = float("nan") if cell["spread"] is None else cell["spread"]
    return spread_cell(cell["value"], spread, decimals)


def published_text(cell: Cell, table: str) -> str:
    """The published value; "" where there is none of the same data."""
    score = score_key(cell["score"])
    value, dataset = published_value({**cell, "score": score, "table": table})
    if value is None or dataset != cell["dataset"]:
        return ""
    return number_cell(value, 3 if abs(value) < 1 else 2)


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
