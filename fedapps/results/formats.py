"""A table of texts for a terminal, as Markdown or as LaTeX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from fedapps.console import visible

FAILED = "failed"
LEFT = ("score", "method")  # columns of words; the others are aligned to the right
LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"{{{sign}}}" for sign in "[]"},  # a row that begins with [ is no option of \\
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "<": "$<$",
    ">": "$>$",
    "≥": r"$\geq$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "α": r"$\alpha$",
    "ε": r"$\varepsilon$",
}


@dataclass(frozen=True)
class TextTable:
    """A table as it is shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


def as_rich(shown: TextTable) -> Table:
    """The table for a terminal."""
    table = Table(title=Text(visible(shown.title)), caption=Text(visible(shown.caption)))
    for column in shown.columns:
        justify: Literal["left", "right"] = "left" if column in LEFT else "right"
        table.add_column(Text(visible(column)), justify=justify, overflow="fold")
    for row in shown.rows:
        table.add_row(*(Text(visible(cell), "red" if cell == FAILED else "") for cell in row))
    return table


def as_markdown(shown: TextTable) -> str:
    """A pipe table with the title above and the caption below."""
    head, *rows = [map(escape_markdown, row) for row in (shown.columns, *shown.rows)]
    lines = [head, ["---"] * len(shown.columns), *rows]
    table = ["| " + " | ".join(row) + " |" for row in lines]
    title, caption = escape_markdown(shown.title), escape_markdown(shown.caption)
    return "\n".join([f"**{title}**", "", *table, "", f"*{caption}*", ""])


def as_latex(shown: TextTable) -> str:
    """A table for the package booktabs; a rule separates blocks of equal first cells."""
    rows: list[str] = []
    before = None
    for row in shown.rows:
        if before not in (None, row[0]):
            rows.append(r"\midrule")
        rows.append(" & ".join(map(_latex, row)) + r" \\")
        before = row[0]
    columns = "".join("l" if column in LEFT else "r" for column in shown.columns)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex(shown.title)}. {_latex(shown.caption)}.}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(map(_latex, shown.columns)) + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join([*lines, ""])


def escape_markdown(text: str) -> str:
    """The text in one line of Markdown, without markup."""
    return re.sub(r"[\\`*_\[\]{}<>|&~]", r"\\\g<0>", visible(text))


def _latex(text: str) -> str:
    return re.sub("|".join(map(re.escape, LATEX)), lambda sign: LATEX[sign[0]], visible(text))
