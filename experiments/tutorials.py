"""A tutorial of docs/tutorials/ is one Markdown page, one notebook, and one program.

Its Python and shell blocks are the cells, a block with ``title="my_lab.py"`` is a file, and a
``text`` block is what the cell before it prints."""

import ast
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
FENCE = re.compile(r'^```(python|sh|text)(?: title="(.*?)")?\n(.*?)^```\n', re.M | re.S)


def cells(text: str) -> Iterator[tuple[str, str, str]]:
    """The cells in order: the kind, the file that it writes or "", the content."""
    end = 0  # of the cell before
    for fence in FENCE.finditer(text):
        prose = text[end : fence.start()].strip()
        if prose:
            yield "markdown", "", prose
        kind, file, content = fence.groups()
        yield kind, file or "", content
        end = fence.end()
    prose = text[end:].strip()
    if prose:
        yield "markdown", "", prose


def notebook(text: str) -> str:
    """The tutorial as a Jupyter notebook. Figures are left out: their cells draw them."""
    made: list[dict[str, Any]] = []
    for kind, file, content in cells(text):
        if kind == "text":
            made[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": content}]
            continue
        cell: dict[str, Any] = {"cell_type": "code", "metadata": {}}
        if kind == "markdown":
            cell["cell_type"] = "markdown"
            cell["source"] = re.sub(r"^!\[.*\n?", "", content, flags=re.M)
        else:
            # Jupyter writes the first cell to a file, and gives the second to a shell.
            magic = ""
            if file:
                magic = f"%%writefile {file}\n"
            elif kind == "sh":
                magic = "%%bash\n"
            cell["source"] = magic + content.rstrip()
            cell["execution_count"] = None
            cell["outputs"] = []
        made.append(cell)
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": made, "metadata": python, "nbformat": 4, "nbformat_minor": 5})


def execute(text: str) -> Iterator[tuple[str, Any]]:
    """Run the Python cells in the current folder; what each prints, and its last expression.

    Cells that are files are written. Shell cells are left out."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for kind, file, content in cells(text):
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(content, "utf-8")
        elif kind == "python":
            code = ast.parse(content)
            # As a notebook does: a last expression is the cell's value.
            expression = None
            if isinstance(code.body[-1], ast.Expr):
                expression = ast.Expression(code.body.pop().value)  # type: ignore[attr-defined]
            value = None
            with redirect_stdout(StringIO()) as printed:
                exec(compile(code, "cell", "exec"), names)
                if expression is not None:
                    value = eval(compile(expression, "cell", "eval"), names)
            yield printed.getvalue(), value
