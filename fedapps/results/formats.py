"""A table of results as Markdown or LaTeX; rich's is `table.rich_table`."""

import re

from fedapps.console import visible
from fedapps.results.table import Results

LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"{{{sign}}}" for sign in "[]"},  # a row that begins with one is no option of \\\\
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


def as_markdown(results: Results) -> str:
    """A pipe table with the title above and the caption below."""
    head, *rows = [map(_markdown, row) for row in (results.columns, *results.rows)]
    lines = [head, ["---"] * len(results.columns), *rows]
    table = ["| " + " | ".join(row) + " |" for row in lines]
    title, caption = _markdown(results.title), _markdown(results.caption)
    return "\n".join([f"**{title}**", "", *table, "", f"*{caption}*", ""])


def as_latex(results: Results) -> str:
    """A table by the package booktabs; a rule between blocks of equal first cells."""
    rows: list[str] = []
    before = None
    for row in results.rows:
        if before not in (None, row[0]):
            rows.append(r"\midrule")
        rows.append(" & ".join(map(_latex, row)) + r" \\")
        before = row[0]
    numbers = [i for i, c in enumerate(results.columns) if c in ("score", "method")]
    columns = "".join("l" if i in numbers else "r" for i in range(len(results.columns)))
    head = " & ".join(map(_latex, results.columns)) + r" \\"
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(results.title)}. {_latex(results.caption)}.}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            head,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _markdown(text: str) -> str:
    return re.sub(r"[\\`*_\[\]{}<>|&~]", r"\\\g<0>", visible(text))


def _latex(text: str) -> str:
    return re.sub("|".join(map(re.escape, LATEX)), lambda found: LATEX[found[0]], visible(text))
