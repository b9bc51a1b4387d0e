"""The same comparison with the values of one setting side by side: novel-shots 0, 1, 5, 20."""

from collections.abc import Sequence

from fedapps.engines.jobs import Job
from fedapps.results.comparison import LEVEL, Comparison, Line, caption, number, order
from fedapps.results.published import SCORES
from fedapps.results.table import Results
from fedapps.settings.config import effective

SHOTS = "novel-shots"


def several(jobs: Sequence[Job], key: str) -> bool:
    """Whether the runs differ in a setting."""
    return len({effective(job.config, key) for job in jobs if not job.error}) > 1


def side_by_side(found: Comparison, key: str, scores: Sequence[str] = tuple(SCORES)) -> Results:
    """A column for each value of `key`, which is one of what makes the comparison's rows.

    A cell is mean ± deviation over seeds, ↑ or ↓ where it is judged to differ from the reference
    in its own column, and the published value in brackets."""
    place = found.by.index(key)
    values = sorted({line.by[place] for line in found.lines}, key=order)
    table: dict[tuple[str, ...], dict[str, Line]] = {}
    for line in found.lines:
        if line.score in scores:
            rest = (SCORES[line.score], *line.by[:place], *line.by[place + 1 :])
            table.setdefault(rest, {})[line.by[place]] = line
    rows = [
        [*rest, *(cell(cells[value]) if value in cells else "–" for value in values)]
        for rest, cells in table.items()
    ]
    lines = [line for cells in table.values() for line in cells.values()]
    notes = [caption(found, set())]
    if any(line.p is not None for line in lines):
        notes.append(
            f"↑, ↓: more, less than {found.against} of the same column by {found.test}, two-sided, "
            f"p < {LEVEL}, not corrected for the number of cells"
        )
    if any(line.published is not None for line in lines):
        notes.append("in brackets: published")
    if key == SHOTS:
        notes.append("who shows labels is scored on the other samples")
    first = found.lines[0].runs[0].config if found.lines else {}
    title = (
        f"{first.get('dataset', '')}, {first.get('partition', '')}, {found.round} round, by {key}"
    )
    head = ["score", *(one for one in found.by if one != key), *(f"{key} {v}" for v in values)]
    return Results(title, head, rows, "; ".join(notes))


def cell(line: Line) -> str:
    """``70.00 ± 1.00 ↑ (68.00)``."""
    told = [line.measured]
    if line.p is not None and line.p < LEVEL and line.difference:
        told.append("↑" if line.difference > 0 else "↓")
    if line.published is not None:
        told.append(f"({number(line, line.published)})")
    return " ".join(told)
