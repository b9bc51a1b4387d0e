"""Tables as text: numbers as cells, and a table for a terminal, as Markdown or as LaTeX.

One summary over seeds and one way to write it, in every table."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from io import StringIO
from math import floor, isnan, log10
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedapps.console import make_console, visible

if TYPE_CHECKING:
    from pandas import Series

FAILED = "failed"
UNKNOWN = "–"
MAX_DECIMALS = 9
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


_DISPLAYED = """
Local FedAvg FedProx SCAFFOLD AFL FedGMA FedADG FedSR FedMA FedPer FedRep LG-FedAvg Per-FedAvg
pFedMe Ditto APFL FedBN FedBABU FedAMP FedALA TENT T3A SHOT BN-Adapt Prior-EM BBSE Auto MEMO ATP
FedTHE FedTHE+ BTFL pFedHN pFedHN-PC ODPFL-HN PeFLL HyperFedZero FLowDUP PFL-sampled PFL-nearest
PFL-ensemble FedTTA FedTTA-Prox FedTTA++ FedTTA++-guarded FedMD HeteroTENT HeteroFedTTA FedEmbed
Global Global+ pFedKM
"""  # names of methods in texts, such as a paper's table; in lower case those of `METHODS`


class Summarized(NamedTuple):
    """Mean and standard deviation over seeds. `deviation` is NaN for fewer than two values, and
    `mean` for none."""

    mean: float
    deviation: float


def summarize(values: "Series") -> Summarized:
    """Mean and sample standard deviation of the values that are known."""
    known = values.dropna()
    return Summarized(float(known.mean()), float(known.std()))


def decimals_of(value: float) -> int:
    """The decimals that give a number of any size four significant digits; 2 for 0 and NaN."""
    if isnan(value) or not value:
        return 2
    return min(max(3 - floor(log10(abs(value))), 0), MAX_DECIMALS)


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


@dataclass(frozen=True)
class TextTable:
    """A table as it is shown; `best` has the places (row, column) of the values that are confirmed
    as best, and `best_means` says what confirms them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    best: Collection[tuple[int, int]] = field(default_factory=frozenset)
    best_means: str = ""


def displayed(label: str) -> str:
    """A method's label, "tent lr=0.1", with the method's name as texts write it."""
    name, *settings = label.split(" ")
    names = {text.lower(): text for text in _DISPLAYED.split()}
    return " ".join([names.get(name, name), *settings])


def as_text(shown: TextTable, width: int = 120) -> str:
    """The table as `width` characters wide text."""
    file = StringIO()
    make_console(file=file, width=width).print(as_rich(shown))
    return file.getvalue().rstrip()


def as_rich(shown: TextTable) -> "FittedTable":
    """The table for a terminal."""
    return FittedTable(shown)


@dataclass(frozen=True)
class FittedTable:
    """A table that goes on below, with its first column again, where the terminal is too narrow."""

    shown: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self.shown
        rest = list(range(1, len(shown.columns)))
        title = shown.title
        caption = shown.caption
        while True:
            count = len(rest)
            while count > 1 and _width(shown, [0, *rest[:count]]) > options.max_width:
                count -= 1
            columns = [0, *rest[:count]]
            rest = rest[count:]
            if rest:
                caption = ""  # a part may be narrow, and a caption is as narrow as its table
            yield _rich(shown, columns, title, caption)
            title = ""
            if not rest:
                break
        if shown.caption != caption:
            yield Text(visible(shown.caption), style="table.caption", justify="center")


def _width(shown: TextTable, columns: Sequence[int]) -> int:
    """The least width at which no number is broken, and no word of a title."""
    width = 1
    for number in columns:
        parts = visible(shown.columns[number]).split()
        parts += [visible(row[number]) for row in shown.rows]
        width += 3 + max(map(cell_len, parts), default=0)
    return width


def _rich(shown: TextTable, columns: Sequence[int], title: str, caption: str) -> Table:
    """Some columns of the table."""
    table = Table(
        title=Text(visible(title)) if title else None,
        caption=Text(visible(caption)) if caption else None,
    )
    for number in columns:
        column = shown.columns[number]
        justify: Literal["left", "right"] = "left" if column in LEFT else "right"
        table.add_column(Text(visible(column)), justify=justify, overflow="fold")
    for row in shown.rows:
        cells = []
        for number in columns:
            style = "red" if row[number] == FAILED else ""
            cells.append(Text(visible(row[number]), style))
        table.add_row(*cells)
    return table


def as_markdown(shown: TextTable) -> str:
    """A pipe table with the title above and the caption below."""
    title = escape_markdown(shown.title)
    caption = escape_markdown(shown.caption)
    lines = [f"**{title}**", ""]
    lines.append(_pipes(shown.columns))
    lines.append("| " + " | ".join(["---"] * len(shown.columns)) + " |")
    lines += [_pipes(row) for row in shown.rows]
    lines += ["", f"*{caption}*", ""]
    return "\n".join(lines)


def _pipes(row: Sequence[str]) -> str:
    """A row of a pipe table; its texts are escaped."""
    cells = [escape_markdown(cell) for cell in row]
    return f"| {' | '.join(cells)} |"


def as_latex(shown: TextTable) -> str:
    """A table for the package booktabs: a rule separates blocks of equal first cells, values
    that are confirmed as best are bold, the caption is the title, and notes stand below."""
    rows: list[str] = []
    for i, row in enumerate(shown.rows):
        if i and shown.rows[i - 1][0] != row[0]:
            rows.append(r"\midrule")
        cells = []
        for j, cell in enumerate(row):
            text = _latex(cell)
            if (i, j) in shown.best:
                text = rf"\textbf{{{text}}}"
            cells.append(text)
        rows.append(" & ".join(cells) + r" \\")
    notes = [shown.caption]
    if shown.best:
        notes.append(f"Bold: {shown.best_means}")
    alignment = ["l" if column in LEFT else "r" for column in shown.columns]
    label = re.sub("[^a-z0-9]+", "-", shown.title.lower()).strip("-")
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex(shown.title)}.}}",
        rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{{''.join(alignment)}}}",
        r"\toprule",
        " & ".join(map(_latex, shown.columns)) + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        rf"\par\smallskip\footnotesize {_latex('. '.join(notes))}.",
        r"\end{table}",
    ]
    return "\n".join([*lines, ""])


def escape_markdown(text: str) -> str:
    """The text in one line of Markdown, without markup."""
    return re.sub(r"[\\`*_\[\]{}<>|&~]", r"\\\g<0>", visible(text))


def _latex(text: str) -> str:
    signs = "|".join(re.escape(sign) for sign in LATEX)
    return re.sub(signs, lambda match: LATEX[match[0]], visible(text))
