"""Fills the tables of pages: ``python -m experiments.fill_page PAGE … [--runs FOLDER]``.

A page holds, for each table, what makes it: a record of experiments/measured/
(`experiments.record_table`), or a command.

    <!-- record pfedhn-table3 -->
    <!-- end -->

    <!-- fedapps table board --scores gain -->
    the table, which is replaced
    <!-- end -->

The tables of records are always filled. A command runs in FOLDER, which holds the folders of runs;
without FOLDER its table stays."""

import contextlib
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer.testing import CliRunner

from experiments.record_table import record_table
from fedapps.commands.main import cli

OF_RECORD = re.compile(r"<!-- record (.*?) -->\n.*?<!-- end -->", re.DOTALL)
OF_COMMAND = re.compile(r"<!-- fedapps (table .*?) -->\n.*?<!-- end -->", re.DOTALL)


def with_records(page: str) -> str:
    """The page with the tables of its records. Raises ValueError for an unknown record."""

    def table(block: re.Match[str]) -> str:
        return f"<!-- record {block[1]} -->\n{record_table(block[1])}\n\n<!-- end -->"

    return OF_RECORD.sub(table, page)


def with_commands(page: str) -> str:
    """The page with what its commands print. Raises RuntimeError for a command that fails."""

    def table(block: re.Match[str]) -> str:
        command = block[1]
        done = CliRunner().invoke(cli, [*shlex.split(command), "--format", "markdown"])
        if done.exit_code:
            raise RuntimeError(f"fedapps {command}: {done.output.strip()}")
        return (
            f"<!-- fedapps {command} -->\n`fedapps {command}`:\n\n{done.stdout.strip()}\n\n"
            "<!-- end -->"
        )

    return OF_COMMAND.sub(table, page)


def main(
    pages: list[Path],
    runs: Annotated[Path | None, typer.Option(help="The folder in which commands run.")] = None,
) -> None:
    """Fill the pages in place."""
    for page in pages:
        text = with_records(page.read_text("utf-8"))
        if runs is not None:
            with contextlib.chdir(runs):
                text = with_commands(text)
        page.write_text(text, "utf-8")


if __name__ == "__main__":
    typer.run(main)
