"""Fills the tables of a page from run folders: ``python -m experiments.fill_page PAGE [FOLDER]``.

A page holds, for each table, the command that makes it:

    <!-- fedapps table board --scores gain -->
    the table, which is replaced
    <!-- end -->

The command runs in FOLDER, which holds the folders of runs, by default the current one."""

import contextlib
import re
import shlex
import sys
from pathlib import Path

from typer.testing import CliRunner

from fedapps.commands.main import cli

BLOCK = re.compile(r"<!-- fedapps (table .*?) -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str) -> str:
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

    return BLOCK.sub(table, page)


def main(page: Path, folder: Path) -> None:
    """Fill the page in place."""
    text = page.read_text("utf-8")
    with contextlib.chdir(folder):
        text = filled(text)
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(*sys.argv[2:3]))
