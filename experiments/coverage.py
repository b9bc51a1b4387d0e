"""Makes docs/results/coverage.md: ``python -m experiments.coverage``; ``--count`` prints how many
items of the papers are measured, and how many values are older than their method's code.

experiments/published/items.toml names the items. The values are those of experiments/measured/: a
file there is a `reproduced.json` of ``fedapps reproduce``, or has the same form. Its cells have the
version of the method that they measured (`code`, as in summary.json), and newer ones the
fingerprint of what it computes (`experiments.fingerprint`). A value is stale if its fingerprint is
another one now. Without a fingerprint it is stale if the method's version has changed, or if it is
not known."""

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.fingerprint import Numbers, agree, fingerprint
from fedapps.results.formats import number_cell, spread_cell
from fedapps.results.method_code import code_of
from fedapps.settings.experiments import experiments_root
from fedapps.settings.published_tables import published_tables, read_table, score_key

ROOT = experiments_root().parent
PAGE = ROOT / "docs" / "results" / "coverage.md"
MEASURED = "measured"
ITEMS = "published/items.toml"
WHOLLY, IN_PART, NOT = "wholly", "in part", "not"
MIN_SEEDS = 3  # of a value that counts wholly
HEAD = """# Coverage

What the four papers have, where it is, and what is measured of it. `python -m experiments.coverage`
makes this page from `experiments/published/` and `experiments/measured/`. The files there have the
commands.
"""
SUMMARY = """**Of {} items {} are measured wholly, {} in part and {} not.** Wholly means each row
and column with at least three seeds: tables and figures on the paper's data and with its settings,
the others on any data.

**{} of {} values are stale; {} of these were measured before records kept the method's version.**
A newer record keeps the numbers of a small run with its settings. A value is stale if that small
run gives other numbers now, beyond rounding. A rewrite that computes the same leaves the value.
Nobody can tell whether today's code would give a value without a version. It counts as stale until
it is measured again.
"""
COLUMNS = ("kind", "item", "where", "measured", "data", "ours", "published",
           "difference: mean, largest", "stale", "what is missing")  # fmt: skip
Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """An item of a paper. A cell belongs to it by `records`, `rows` and `columns`; an empty list
    takes all. `data` is the dataset of a table or a figure, "" for what may be measured on any."""

    paper: str
    kind: str
    name: str
    code: str
    records: Sequence[str] = ()
    table: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    data: str = ""
    lacks: str = ""


@dataclass
class Measured:
    """The cells of an item, those that it has not, and what follows from both."""

    item: Item
    cells: list[Cell] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)

    @property
    def status(self) -> str:
        """Whether it is measured wholly: each cell, over seeds, and on the paper's data."""
        if not self.cells:
            return NOT
        seeds = all(len(cell["seeds"]) >= MIN_SEEDS for cell in self.cells)
        elsewhere = {cell["dataset"] for cell in self.cells} - {self.item.data}
        if self.item.lacks or self.missing or not seeds or (self.item.data and elsewhere):
            return IN_PART
        return WHOLLY


def read_items() -> list[Item]:
    """The items of the papers."""
    content = tomllib.loads((experiments_root() / ITEMS).read_text("utf-8"))
    return [Item(**one) for one in content["items"]]


def read_records() -> dict[str, dict[str, Any]]:
    """The records of measurements by the names of their files. A cell that has a fingerprint holds
    it."""
    records: dict[str, dict[str, Any]] = {}
    for file in sorted((experiments_root() / MEASURED).glob("*.json")):
        record = json.loads(file.read_text("utf-8"))
        for cell in record["cells"]:
            if "fingerprint" in cell:
                cell["fingerprint"] = record["fingerprints"][cell["fingerprint"]]
        records[file.stem] = record
    return records


def measured(item: Item, records: Mapping[str, Mapping[str, Any]]) -> Measured:
    """The cells of an item. Raises ValueError for a record that there is not."""
    found = Measured(item)
    seen: set[tuple[str, str]] = set()
    for name in item.records:
        if name not in records:
            raise ValueError(f"{item.name} names the record {name!r}; known: {', '.join(records)}")
        for cell in records[name]["cells"]:
            in_columns = not item.columns or cell["column"] in item.columns
            in_rows = not item.rows or cell["row"] in item.rows
            if in_columns and in_rows:
                score = score_key(cell["score"])
                table = records[name]["table"]
                found.cells.append({**cell, "score": score, "table": table})
                seen.add((cell["column"], cell["row"]))
    found.missing = _missing(item, seen)
    return found


def _missing(item: Item, seen: Set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The columns and rows of an item without a cell. An item that names no columns needs each row
    once, and one that names no rows each column."""
    columns = {column for column, _ in seen}
    rows = {row for _, row in seen}
    if not item.columns:
        return [("", row) for row in item.rows if row not in rows]
    if not item.rows:
        return [(column, "") for column in item.columns if column not in columns]
    missing = []
    for column in item.columns:
        for row in item.rows:
            if (column, row) not in seen:
                missing.append((column, row))
    return missing


def is_stale(cell: Cell) -> bool:
    """Whether a value is that of other code than the present one, or of unknown code."""
    if "fingerprint" in cell:
        recorded = cell["fingerprint"]
        return not agree(recorded["numbers"], numbers_now(json.dumps(recorded["settings"])))
    method = str(cell["row"]).partition(" ")[0]
    return not cell["code"] or cell["code"] != code_of(method)


@cache
def numbers_now(settings: str) -> Numbers:
    """The fingerprint of settings, in JSON; empty if a setting is not known any more."""
    try:
        return fingerprint(json.loads(settings))
    except ValueError as error:
        print(f"no fingerprint of {settings}: {error}")
        return {}


def published_value(cell: Cell) -> tuple[float | None, str]:
    """The published value of a cell, None if there is none, and the dataset of its column."""
    if cell["table"] not in published_tables(experiments_root()):
        return None, ""
    content = read_table(str(cell["table"]), experiments_root())
    of_table = content.get("settings", {}).get("dataset", "")
    for column in content["columns"]:
        if column["name"] == cell["column"]:
            values = column.get(cell["score"], {}).get(cell["row"], [])
            return (values[0] if values else None), column["at"].get("dataset", of_table)
    return None, ""


def row_of_page(found: Measured) -> str:
    """A line of the page's table."""
    item = found.item
    ours, published, difference = _values(found)
    data = ", ".join(sorted({str(cell["dataset"]) for cell in found.cells})) or "–"
    stale = sum(map(is_stale, found.cells))
    age = "0" if found.cells else "–"
    if stale:
        age = f"{stale} of {len(found.cells)}"
    texts = [item.kind, item.name, f"`{item.code}`", found.status, data, ours, published,
             difference, age, item.lacks or "–"]  # fmt: skip
    return f"| {' | '.join(texts)} |"


def _values(found: Measured) -> tuple[str, str, str]:
    """Our value, the published one and the difference; of several cells how many there are, and the
    mean and largest absolute difference, on the paper's data alone."""
    if not found.cells:
        return "–", "–", "–"
    differences = []
    published: list[float] = []
    for cell in found.cells:
        value, dataset = published_value(cell)
        if value is None:
            continue
        published.append(value)
        if cell["dataset"] in (found.item.data, dataset):
            differences.append(cell["value"] - value)
    largest = max(abs(cell["value"]) for cell in found.cells)
    digits = 3 if largest < 1 else 2
    ours = _our_values(found.cells, digits)
    return ours, _range(published, digits), _differences(differences, digits)


def _our_values(cells: Sequence[Cell], digits: int) -> str:
    """A value with its spread, or the range of several values."""
    if len(cells) > 1:
        return _range([float(cell["value"]) for cell in cells], digits)
    (cell,) = cells
    spread = float("nan") if cell["spread"] is None else float(cell["spread"])
    return spread_cell(float(cell["value"]), spread, digits)


def _range(values: Sequence[float], digits: int) -> str:
    """The value, or how many there are with the least and the largest one."""
    if not values:
        return "–"
    least = number_cell(min(values), digits)
    if len(values) == 1:
        return least
    return f"{len(values)}, {least} to {number_cell(max(values), digits)}"


def _differences(differences: Sequence[float], digits: int) -> str:
    """The mean absolute difference, and the largest difference with its sign."""
    if not differences:
        return "–"
    size = mean(abs(difference) for difference in differences)
    largest = max(differences, key=abs)
    return f"{number_cell(size, digits)}, at most {number_cell(largest, digits, signed=True)}"


def page(all_found: Sequence[Measured], records: Mapping[str, Mapping[str, Any]]) -> str:
    """The page."""
    counts = Counter(found.status for found in all_found)
    rows_by_paper: dict[str, list[str]] = {}
    for found in all_found:
        rows_by_paper.setdefault(found.item.paper, []).append(row_of_page(found))
    ages = (_stale(records), len(_cells(records)), _without_version(records))
    items = (len(all_found), counts[WHOLLY], counts[IN_PART], counts[NOT])
    lines = [HEAD, SUMMARY.format(*items, *ages)]
    for paper, rows in rows_by_paper.items():
        lines += [f"## {paper}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [*rows, ""]
    return "\n".join(lines)


def _cells(records: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
    """The cells of all records."""
    cells: list[Cell] = []
    for record in records.values():
        cells += record["cells"]
    return cells


def _stale(records: Mapping[str, Mapping[str, Any]]) -> int:
    """The number of stale values."""
    return sum(map(is_stale, _cells(records)))


def _without_version(records: Mapping[str, Mapping[str, Any]]) -> int:
    """The number of values of unknown age."""
    return sum(not cell["code"] and "fingerprint" not in cell for cell in _cells(records))


def counted(all_found: Sequence[Measured], records: Mapping[str, Mapping[str, Any]]) -> str:
    """The numbers of items and of stale values, in one line."""
    counts = Counter(found.status for found in all_found)
    cells = _cells(records)
    stale = _stale(records)
    items = f"{counts[WHOLLY]} measured wholly, {counts[IN_PART]} in part, {counts[NOT]} not"
    return f"coverage: {len(all_found)} items, {items}; {stale} of {len(cells)} values are stale"


def main(words: Sequence[str]) -> None:
    """Write the page, or print the count alone."""
    if set(words) - {"--count"}:
        raise SystemExit(f"unknown words {' '.join(words)!r}; known: --count")
    records = read_records()
    all_found = [measured(item, records) for item in read_items()]
    if not words:
        Path(PAGE).write_text(page(all_found, records), "utf-8")
    print(counted(all_found, records))


if __name__ == "__main__":
    main(sys.argv[1:])
